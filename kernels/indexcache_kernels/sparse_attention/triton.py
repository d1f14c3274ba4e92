"""Online softmax over gathered keys: no gathered copy is made, and only gradients have the size of the context."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.head_sizes import head_sizes


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    indices,
    out,
    lse,
    scale,
    k_row,
    k_head,
    v_row,
    v_head,
    heads,
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
    """One query, and up to BLOCK_H heads that share their keys. A head has MAIN + TAIL dimensions, both powers of two;
    with SHARED the first V_DIM = MAIN of a key are its value."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    member = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + member
    main, tail, value_dim = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL), tl.arange(0, V_PADDED)
    here = (member < GROUP)[:, None]
    queries = q + (token * heads + head[:, None]) * DIM
    q_main = tl.load(queries + main[None, :], mask=here & (main < DIM)[None, :], other=0.0)
    q_tail = tl.load(queries + tail[None, :], mask=here & (tail < DIM)[None, :], other=0.0)
    if UPCAST:
        q_main, q_tail = q_main.to(tl.float32), q_tail.to(tl.float32)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    mean = tl.zeros((BLOCK_H, V_PADDED), tl.float32)
    for at in range(0, TOPK, BLOCK_K):
        place = at + tl.arange(0, BLOCK_K)
        key = tl.load(indices + token * TOPK + place, mask=place < TOPK, other=-1).to(tl.int64)
        exists = key >= 0
        keys = k + key[:, None] * k_row + kv_head * k_head
        k_main = tl.load(keys + main[None, :], mask=exists[:, None] & (main < DIM)[None, :], other=0.0)
        k_tail = tl.load(keys + tail[None, :], mask=exists[:, None] & (tail < DIM)[None, :], other=0.0)
        if SHARED:
            values = k_main
        else:
            values = tl.load(
                v + key[:, None] * v_row + kv_head * v_head + value_dim[None, :],
                mask=exists[:, None] & (value_dim < V_DIM)[None, :],
                other=0.0,
            )
        if UPCAST:
            k_main, k_tail, values = k_main.to(tl.float32), k_tail.to(tl.float32), values.to(tl.float32)
        score = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)
        score = tl.dot(q_tail, tl.trans(k_tail), score, input_precision=PRECISION) * scale
        score = tl.where(exists[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(highest - base)
        weight = tl.exp(score - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        mean = tl.dot(weight.to(values.dtype), values, mean * shrink[:, None], input_precision=PRECISION)
        highest = higher
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (token * heads + head[:, None]) * V_DIM + value_dim[None, :]
    tl.store(target, mean.to(out.dtype.element_ty), mask=here & (value_dim < V_DIM)[None, :])
    tl.store(lse + token * heads + head, highest + tl.log(total), mask=member < GROUP)


@triton.jit
def _backward_kernel(
    q,
    k,
    v,
    indices,
    lse,
    delta,
    d_out,
    d_q,
    d_k,
    d_v,
    scale,
    k_row,
    k_head,
    v_row,
    v_head,
    heads,
    kv_heads,
    GROUP: tl.constexpr,
    TOPK: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients from one query and up to BLOCK_H heads; those of keys and values are added up in memory."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    member = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = token * heads + kv_head * GROUP + member
    main, tail, value_dim = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL), tl.arange(0, V_PADDED)
    in_main, in_tail, in_value = (main < DIM)[None, :], (tail < DIM)[None, :], (value_dim < V_DIM)[None, :]
    here = member < GROUP
    q_main = tl.load(q + head[:, None] * DIM + main[None, :], mask=here[:, None] & in_main, other=0.0)
    q_tail = tl.load(q + head[:, None] * DIM + tail[None, :], mask=here[:, None] & in_tail, other=0.0)
    grad = tl.load(d_out + head[:, None] * V_DIM + value_dim[None, :], mask=here[:, None] & in_value, other=0.0)
    if UPCAST:
        q_main, q_tail, grad = q_main.to(tl.float32), q_tail.to(tl.float32), grad.to(tl.float32)
    base = tl.load(lse + head, mask=here, other=0.0)
    base = tl.where(base == float("-inf"), 0.0, base)
    mean = tl.load(delta + head, mask=here, other=0.0)
    dq_main = tl.zeros((BLOCK_H, MAIN), tl.float32)
    dq_tail = tl.zeros((BLOCK_H, TAIL), tl.float32)
    for at in range(0, TOPK, BLOCK_K):
        place = at + tl.arange(0, BLOCK_K)
        key = tl.load(indices + token * TOPK + place, mask=place < TOPK, other=-1).to(tl.int64)
        exists = (key >= 0)[:, None]
        keys = k + key[:, None] * k_row + kv_head * k_head
        k_main = tl.load(keys + main[None, :], mask=exists & in_main, other=0.0)
        k_tail = tl.load(keys + tail[None, :], mask=exists & in_tail, other=0.0)
        values = tl.load(
            v + key[:, None] * v_row + kv_head * v_head + value_dim[None, :], mask=exists & in_value, other=0.0
        )
        if UPCAST:
            k_main, k_tail, values = k_main.to(tl.float32), k_tail.to(tl.float32), values.to(tl.float32)
        score = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)
        score = tl.dot(q_tail, tl.trans(k_tail), score, input_precision=PRECISION) * scale
        weight = tl.where((key >= 0)[None, :] & here[:, None], tl.exp(score - base[:, None]), 0.0)
        change = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        change = (weight * (change - mean[:, None]) * scale).to(k_main.dtype)
        dq_main = tl.dot(change, k_main, dq_main, input_precision=PRECISION)
        dq_tail = tl.dot(change, k_tail, dq_tail, input_precision=PRECISION)
        row = key[:, None] * kv_heads + kv_head
        back = tl.trans(change)
        tl.atomic_add(
            d_k + row * DIM + main[None, :], tl.dot(back, q_main, input_precision=PRECISION), exists & in_main
        )
        tl.atomic_add(
            d_k + row * DIM + tail[None, :], tl.dot(back, q_tail, input_precision=PRECISION), exists & in_tail
        )
        back = tl.dot(tl.trans(weight.to(grad.dtype)), grad, input_precision=PRECISION)
        tl.atomic_add(d_v + row * V_DIM + value_dim[None, :], back, exists & in_value)
    target = d_q + head[:, None] * DIM
    tl.store(target + main[None, :], dq_main.to(d_q.dtype.element_ty), mask=here[:, None] & in_main)
    tl.store(target + tail[None, :], dq_tail.to(d_q.dtype.element_ty), mask=here[:, None] & in_tail)


def _sizes(q: Tensor, v: Tensor, indices: Tensor, block_h: int) -> dict[str, Any]:
    """Compile-time sizes of both kernels."""
    v_dim = v.shape[2]
    return {
        **head_sizes(q, v.shape[1], block_h),
        "TOPK": indices.shape[1],
        "V_DIM": v_dim,
        "V_PADDED": max(16, triton.next_power_of_2(v_dim)),
    }


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The result and the logarithm of the denominator."""
    tokens, heads, _ = q.shape
    sizes = _sizes(q, v, indices, 64)
    out = torch.empty((tokens, heads, v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    _forward_kernel[(tokens, triton.cdiv(sizes["GROUP"], sizes["BLOCK_H"]), v.shape[1])](
        q,
        k,
        v,
        indices,
        out,
        lse,
        scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        heads,
        SHARED=v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[2] == sizes["MAIN"],
        BLOCK_K=64,
        num_warps=8,
        num_stages=2,
        **sizes,
    )
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, out: Tensor, lse: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `q`, `k` and `v`; the last two are sums in no fixed order."""
    tokens, heads, _ = q.shape
    sizes = _sizes(q, v, indices, 32)
    delta = (out.float() * d_out.float()).sum(dim=2)
    d_q = torch.empty_like(q)
    d_k, d_v = (torch.zeros(item.shape, dtype=torch.float32, device=q.device) for item in (k, v))
    _backward_kernel[(tokens, triton.cdiv(sizes["GROUP"], sizes["BLOCK_H"]), v.shape[1])](
        q,
        k,
        v,
        indices,
        lse,
        delta,
        d_out,
        d_q,
        d_k,
        d_v,
        scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        heads,
        v.shape[1],
        BLOCK_K=32,
        num_warps=8,
        num_stages=1,
        **sizes,
    )
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


class SparseAttention(torch.autograd.Function):
    """The kernels for autograd; no gradient flows through the second result."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, indices, scale)
        ctx.save_for_backward(q, k, v, indices, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, indices, out, lse = ctx.saved_tensors
        return (*backward(q, k, v, indices, ctx.scale, out, lse, d_out.contiguous()), None, None)
