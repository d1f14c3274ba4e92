"""The kernels of `selected_attention` for autograd, and what makes FlashMLA's results those of `sparse_attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.selected_attention import attend, gradients
from indexcache_kernels.sparse_attention import flash_mla


@triton.jit
def _finish_kernel(
    out_ptr,
    lse_ptr,
    indices_ptr,
    base,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
):
    """Convert a query's logarithm from base 2; set logarithm and result of a query without keys."""
    token, slot, head = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED), tl.arange(0, PADDED_HEADS)
    key = tl.load(indices_ptr + token * TOPK + slot, mask=slot < TOPK, other=-1)
    nothing = tl.max(key, 0) < 0
    offset, mask = token * HEADS + head, head < HEADS
    lse = tl.load(lse_ptr + offset, mask=mask, other=0.0) * base
    tl.store(lse_ptr + offset, tl.where(nothing, float("-inf"), lse), mask=mask)
    if nothing:
        zeros = tl.zeros((PADDED_HEADS, V_DIM), out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset[:, None] * V_DIM + tl.arange(0, V_DIM)[None, :], zeros, mask=mask[:, None])


def finish(out: Tensor, lse: Tensor, indices: Tensor) -> None:
    """Turn the results of FlashMLA, `[T, H, V]` and `[T, H]`, into those of `sparse_attention`, in place.

    FlashMLA has logarithms to base 2, and leaves queries without keys open.
    """
    (tokens, heads, v_dim), topk = out.shape, indices.shape[1]
    _finish_kernel[(tokens,)](
        out_ptr=out, lse_ptr=lse, indices_ptr=indices, base=math.log(2), TOPK=topk,
        PADDED=triton.next_power_of_2(topk), HEADS=heads, PADDED_HEADS=triton.next_power_of_2(heads), V_DIM=v_dim,
    )  # fmt: skip


class SparseAttention(torch.autograd.Function):
    """Attention over selected keys, with `flash` FlashMLA forward; no gradient flows through the second result."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, scale: float, flash: bool
    ) -> tuple[Tensor, Tensor]:
        """Attend, and keep what the gradients need; without `v` as in `selected_attention.attend`."""
        ctx.sizes = {"scale": scale, "block_tokens": 1, "num_warps": 8}
        if flash:
            out, lse = flash_mla.forward(q, k, indices, scale)
            finish(out, lse, indices)
        else:
            cache = _cache(k), None if v is None else _cache(v)
            out, lse = attend(q[None], *cache, v_dim, None, indices[None], None, num_stages=2, **ctx.sizes)
            out = out[0]
        ctx.save_for_backward(q, k, v, indices, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `q`, `k` and `v`; the last two are sums in no fixed order."""
        q, k, v, indices, out, lse = ctx.saved_tensors
        given = (q[None], _cache(k), None if v is None else _cache(v), None, indices[None], None, out[None], lse)
        d_q, *d_cache = gradients(*given, d_out[None], num_stages=3, **ctx.sizes)[:3]
        d_k, d_v = (None if item is None else item[0].transpose(0, 1) for item in d_cache)
        return d_q[0], d_k, d_v, None, None, None, None


def _cache(rows: Tensor) -> Tensor:
    """View `[L, G, D]` as the cache of one request, `[1, G, L, D]`."""
    return rows.transpose(0, 1)[None]
