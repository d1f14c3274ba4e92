"""Online softmax over gathered keys: no gathered copy is made, and nothing has the size of the context."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import head_sizes, load_heads, load_rows, products


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    out_ptr,
    lse_ptr,
    scale,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_heads,
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
    """Attend from one query, with up to BLOCK_H heads that share their keys.

    A head has MAIN + TAIL dimensions, both powers of two; with SHARED the first V_DIM = MAIN of a key are its value.
    """
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    group_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head = kv_head * GROUP + group_head
    value_dim = tl.arange(0, V_PADDED)
    head_mask = (group_head < GROUP)[:, None]  # [BLOCK_H, 1]
    q_main, q_tail = load_heads(q_ptr + (token * num_heads + head) * DIM, group_head < GROUP, DIM, MAIN, TAIL, UPCAST)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)  # [BLOCK_H]
    total = tl.zeros((BLOCK_H,), tl.float32)  # [BLOCK_H]
    mean = tl.zeros((BLOCK_H, V_PADDED), tl.float32)  # [BLOCK_H, V_PADDED]
    for first in range(0, TOPK, BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        key = tl.load(indices_ptr + token * TOPK + slot, mask=slot < TOPK, other=-1).to(tl.int64)
        key_mask = key >= 0
        k_main, k_tail = load_heads(
            k_ptr + key * k_row_stride + kv_head * k_head_stride, key_mask, DIM, MAIN, TAIL, UPCAST
        )
        values = k_main  # [BLOCK_K, V_PADDED]
        if not SHARED:
            values = load_rows(v_ptr + key * v_row_stride + kv_head * v_head_stride, key_mask, V_DIM, V_PADDED, UPCAST)
        score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)  # [BLOCK_H, BLOCK_K]
        score = tl.where(key_mask[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(highest - base)  # [BLOCK_H]
        weight = tl.exp(score - base[:, None])  # [BLOCK_H, BLOCK_K]
        total = total * shrink + tl.sum(weight, 1)
        mean = tl.dot(weight.to(values.dtype), values, mean * shrink[:, None], input_precision=PRECISION)
        highest = higher
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + (token * num_heads + head[:, None]) * V_DIM + value_dim[None, :]
    tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=head_mask & (value_dim < V_DIM)[None, :])
    tl.store(lse_ptr + token * num_heads + head, highest + tl.log(total), mask=group_head < GROUP)


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


def sizes(q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, block_h: int) -> dict[str, Any]:
    """Return the sizes and strides that a kernel takes, for programs of `block_h` heads."""
    values = k if v is None else v
    return {
        **head_sizes(q, k.shape[1], block_h),
        "k_row_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "v_row_stride": values.stride(0),
        "v_head_stride": values.stride(1),
        "num_heads": q.shape[1],
        "TOPK": indices.shape[1],
        "V_DIM": v_dim,
        "V_PADDED": max(16, triton.next_power_of_2(v_dim)),
        "SHARED": v is None,
    }


def attend(q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return what `sparse_attention` does.

    Without `v`, the first `v_dim` dimensions of `k` are the values, and `v_dim` must be the largest power of two in the
    size of a head.
    """
    given = sizes(q, k, v, v_dim, indices, 64)
    out = torch.empty((*q.shape[:2], v_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _forward_kernel[(len(q), triton.cdiv(given["GROUP"], given["BLOCK_H"]), k.shape[1])](
        q_ptr=q, k_ptr=k, v_ptr=v, indices_ptr=indices, out_ptr=out, lse_ptr=lse, scale=scale, BLOCK_K=64,
        num_warps=8, num_stages=2, **given,
    )  # fmt: skip
    return out, lse
