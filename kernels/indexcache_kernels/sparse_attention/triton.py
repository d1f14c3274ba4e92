"""Online softmax over gathered keys: no gathered copy is made, and only gradients have the size of the context."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import head_sizes, load_heads, load_rows, products
from indexcache_kernels.sparse_attention import flash_mla, hopper


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


def _sizes(q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, block_h: int) -> dict[str, Any]:
    """Return the sizes and strides that both kernels take."""
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


class SparseAttention(torch.autograd.Function):
    """The kernels for autograd; with `flash` FlashMLA attends, with `by_hopper` gradients are by `hopper`.

    No gradient flows through the second result. Without `v`, the first `v_dim` dimensions of `k` are the values, and
    `v_dim` must be the largest power of two in the size of a head. Gradients of `k` and `v` are sums in no fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, scale: float, flash: bool,
        by_hopper: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend, and keep what the gradients need."""
        if flash:
            out, lse = flash_mla.forward(q, k, indices, scale)
            finish(out, lse, indices)
        else:
            sizes = _sizes(q, k, v, v_dim, indices, 64)
            out = torch.empty((*q.shape[:2], v_dim), dtype=q.dtype, device=q.device)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            _forward_kernel[(len(q), triton.cdiv(sizes["GROUP"], sizes["BLOCK_H"]), k.shape[1])](
                q_ptr=q, k_ptr=k, v_ptr=v, indices_ptr=indices, out_ptr=out, lse_ptr=lse, scale=scale, BLOCK_K=64,
                num_warps=8, num_stages=2, **sizes,
            )  # fmt: skip
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
        sizes, d_q = _sizes(q, k, v, out.shape[2], indices, 32), torch.empty_like(q)
        d_k = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
        d_v = None if v is None else torch.zeros(v.shape, dtype=torch.float32, device=q.device)
        _backward_kernel[(len(q), triton.cdiv(sizes["GROUP"], sizes["BLOCK_H"]), k.shape[1])](
            q_ptr=q, k_ptr=k, v_ptr=v, indices_ptr=indices, lse_ptr=lse, delta_ptr=delta, d_out_ptr=d_out,
            d_q_ptr=d_q, d_k_ptr=d_k, d_v_ptr=d_v, scale=ctx.scale, num_kv_heads=k.shape[1], BLOCK_K=32, num_warps=8,
            num_stages=3, **sizes,
        )  # fmt: skip
        return d_q, d_k.to(k.dtype), None if d_v is None else d_v.to(v.dtype), *(None,) * 5
