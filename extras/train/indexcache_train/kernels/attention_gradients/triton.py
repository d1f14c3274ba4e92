"""The gradients of sparse attention: weights are computed again, and only those of keys and values have their size."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels import sparse_attention
from indexcache_kernels.heads import load_heads, load_rows, products
from indexcache_kernels.sparse_attention.triton import sizes
from indexcache_train.kernels.attention_gradients import hopper


@triton.jit
def _backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    lse_ptr,
    delta_ptr,
    d_out_ptr,
    d_q_ptr,
    d_k_ptr,
    d_v_ptr,
    scale,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_heads,
    num_kv_heads,
    GROUP: tl.constexpr,
    TOPK: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients from one query and up to BLOCK_H heads; add those of keys and values in memory."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    group_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head = token * num_heads + kv_head * GROUP + group_head
    main, tail, value_dim = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL), tl.arange(0, V_PADDED)
    main_mask, tail_mask = (main < DIM)[None, :], (tail < DIM)[None, :]
    head_mask = group_head < GROUP
    q_main, q_tail = load_heads(q_ptr + head * DIM, head_mask, DIM, MAIN, TAIL, UPCAST)
    grad = load_rows(d_out_ptr + head * V_DIM, head_mask, V_DIM, V_PADDED, UPCAST)  # [BLOCK_H, V_PADDED]
    base = tl.load(lse_ptr + head, mask=head_mask, other=0.0)
    base = tl.where(base == float("-inf"), 0.0, base)
    mean = tl.load(delta_ptr + head, mask=head_mask, other=0.0)
    dq_main = tl.zeros((BLOCK_H, MAIN), tl.float32)  # [BLOCK_H, MAIN]
    dq_tail = tl.zeros((BLOCK_H, TAIL), tl.float32)  # [BLOCK_H, TAIL]
    for first in range(0, TOPK, BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        key = tl.load(indices_ptr + token * TOPK + slot, mask=slot < TOPK, other=-1).to(tl.int64)
        key_mask = (key >= 0)[:, None]
        k_main, k_tail = load_heads(
            k_ptr + key * k_row_stride + kv_head * k_head_stride, key >= 0, DIM, MAIN, TAIL, UPCAST
        )
        values = k_main  # [BLOCK_K, V_PADDED]
        if not SHARED:
            values = load_rows(v_ptr + key * v_row_stride + kv_head * v_head_stride, key >= 0, V_DIM, V_PADDED, UPCAST)
        score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)  # [BLOCK_H, BLOCK_K]
        weight = tl.where((key >= 0)[None, :] & head_mask[:, None], tl.exp(score - base[:, None]), 0.0)
        d_score = tl.dot(grad, tl.trans(values), input_precision=PRECISION)  # [BLOCK_H, BLOCK_K]
        d_score = (weight * (d_score - mean[:, None]) * scale).to(k_main.dtype)
        dq_main = tl.dot(d_score, k_main, dq_main, input_precision=PRECISION)
        dq_tail = tl.dot(d_score, k_tail, dq_tail, input_precision=PRECISION)
        key_row = key[:, None] * num_kv_heads + kv_head  # [BLOCK_K, 1]
        d_key = tl.dot(tl.trans(d_score), q_main, input_precision=PRECISION)  # [BLOCK_K, MAIN]
        d_value = tl.trans(weight.to(grad.dtype))  # [BLOCK_K, BLOCK_H]
        if SHARED:
            d_key = tl.dot(d_value, grad, d_key, input_precision=PRECISION)
        else:
            ptrs = d_v_ptr + key_row * V_DIM + value_dim[None, :]
            d_value = tl.dot(d_value, grad, input_precision=PRECISION)  # [BLOCK_K, V_PADDED]
            tl.atomic_add(ptrs, d_value, key_mask & (value_dim < V_DIM)[None, :], sem="relaxed")
        tl.atomic_add(d_k_ptr + key_row * DIM + main[None, :], d_key, key_mask & main_mask, sem="relaxed")
        d_key = tl.dot(tl.trans(d_score), q_tail, input_precision=PRECISION)  # [BLOCK_K, TAIL]
        tl.atomic_add(d_k_ptr + key_row * DIM + tail[None, :], d_key, key_mask & tail_mask, sem="relaxed")
    ptrs = d_q_ptr + head[:, None] * DIM
    tl.store(ptrs + main[None, :], dq_main.to(d_q_ptr.dtype.element_ty), mask=head_mask[:, None] & main_mask)
    tl.store(ptrs + tail[None, :], dq_tail.to(d_q_ptr.dtype.element_ty), mask=head_mask[:, None] & tail_mask)


class SparseAttention(torch.autograd.Function):
    """The kernels for autograd; with `by_hopper` gradients are by `hopper`.

    No gradient flows through the second result. Inputs are laid out by `indexcache_kernels.sparse_attention.laid_out`.
    Gradients of `k` and `v` are sums in no fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, scale: float, backend: Any,
        by_hopper: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend, and keep what the gradients need."""
        out, lse = sparse_attention(q, k, v_dim if v is None else v, indices, scale, backend)
        ctx.save_for_backward(q, k, v, indices, out, lse)
        ctx.scale, ctx.by_hopper = scale, by_hopper
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `q`, `k` and `v`."""
        q, k, v, indices, out, lse = ctx.saved_tensors
        delta, d_out = (out.float() * d_out.float()).sum(dim=2), d_out.contiguous()
        if ctx.by_hopper:
            return *hopper.gradients(q, k, indices, lse, delta, d_out, ctx.scale), *(None,) * 6
        given, d_q = sizes(q, k, v, out.shape[2], indices, 32), torch.empty_like(q)
        d_k = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
        d_v = None if v is None else torch.zeros(v.shape, dtype=torch.float32, device=q.device)
        _backward_kernel[(len(q), triton.cdiv(given["GROUP"], given["BLOCK_H"]), k.shape[1])](
            q_ptr=q, k_ptr=k, v_ptr=v, indices_ptr=indices, lse_ptr=lse, delta_ptr=delta, d_out_ptr=d_out,
            d_q_ptr=d_q, d_k_ptr=d_k, d_v_ptr=d_v, scale=ctx.scale, num_kv_heads=k.shape[1], BLOCK_K=32, num_warps=8,
            num_stages=3, **given,
        )  # fmt: skip
        return d_q, d_k.to(k.dtype), None if d_v is None else d_v.to(v.dtype), *(None,) * 5
