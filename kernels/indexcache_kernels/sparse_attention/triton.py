"""Online softmax over gathered keys: no gathered copy is made, and only gradients have the size of the context."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import head_sizes, load_heads, load_rows, products
from indexcache_kernels.sparse_attention import flash_mla


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
    value_dim = tl.arange(0, V_PADDED)
    here = (member < GROUP)[:, None]
    q_main, q_tail = load_heads(q + (token * heads + head) * DIM, member < GROUP, DIM, MAIN, TAIL, UPCAST)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    mean = tl.zeros((BLOCK_H, V_PADDED), tl.float32)
    for at in range(0, TOPK, BLOCK_K):
        place = at + tl.arange(0, BLOCK_K)
        key = tl.load(indices + token * TOPK + place, mask=place < TOPK, other=-1).to(tl.int64)
        exists = key >= 0
        k_main, k_tail = load_heads(k + key * k_row + kv_head * k_head, exists, DIM, MAIN, TAIL, UPCAST)
        values = k_main
        if not SHARED:
            values = load_rows(v + key * v_row + kv_head * v_head, exists, V_DIM, V_PADDED, UPCAST)
        score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)
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
    SHARED: tl.constexpr,
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
    in_main, in_tail = (main < DIM)[None, :], (tail < DIM)[None, :]
    here = member < GROUP
    q_main, q_tail = load_heads(q + head * DIM, here, DIM, MAIN, TAIL, UPCAST)
    grad = load_rows(d_out + head * V_DIM, here, V_DIM, V_PADDED, UPCAST)
    base = tl.load(lse + head, mask=here, other=0.0)
    base = tl.where(base == float("-inf"), 0.0, base)
    mean = tl.load(delta + head, mask=here, other=0.0)
    dq_main = tl.zeros((BLOCK_H, MAIN), tl.float32)
    dq_tail = tl.zeros((BLOCK_H, TAIL), tl.float32)
    for at in range(0, TOPK, BLOCK_K):
        place = at + tl.arange(0, BLOCK_K)
        key = tl.load(indices + token * TOPK + place, mask=place < TOPK, other=-1).to(tl.int64)
        exists = (key >= 0)[:, None]
        k_main, k_tail = load_heads(k + key * k_row + kv_head * k_head, key >= 0, DIM, MAIN, TAIL, UPCAST)
        values = k_main
        if not SHARED:
            values = load_rows(v + key * v_row + kv_head * v_head, key >= 0, V_DIM, V_PADDED, UPCAST)
        score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)
        weight = tl.where((key >= 0)[None, :] & here[:, None], tl.exp(score - base[:, None]), 0.0)
        change = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        change = (weight * (change - mean[:, None]) * scale).to(k_main.dtype)
        dq_main = tl.dot(change, k_main, dq_main, input_precision=PRECISION)
        dq_tail = tl.dot(change, k_tail, dq_tail, input_precision=PRECISION)
        row = key[:, None] * kv_heads + kv_head
        back = tl.dot(tl.trans(change), q_main, input_precision=PRECISION)
        value_back = tl.trans(weight.to(grad.dtype))
        if SHARED:
            back = tl.dot(value_back, grad, back, input_precision=PRECISION)
        else:
            target = d_v + row * V_DIM + value_dim[None, :]
            value_back = tl.dot(value_back, grad, input_precision=PRECISION)
            tl.atomic_add(target, value_back, exists & (value_dim < V_DIM)[None, :], sem="relaxed")
        tl.atomic_add(d_k + row * DIM + main[None, :], back, exists & in_main, sem="relaxed")
        back = tl.dot(tl.trans(change), q_tail, input_precision=PRECISION)
        tl.atomic_add(d_k + row * DIM + tail[None, :], back, exists & in_tail, sem="relaxed")
    target = d_q + head[:, None] * DIM
    tl.store(target + main[None, :], dq_main.to(d_q.dtype.element_ty), mask=here[:, None] & in_main)
    tl.store(target + tail[None, :], dq_tail.to(d_q.dtype.element_ty), mask=here[:, None] & in_tail)


def forward(q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The result and the logarithm of the denominator; without `v`, the first `v_dim` dimensions of `k` are the values.

    Without `v`, `v_dim` must be the largest power of two in the size of a head.
    """
    tokens, heads, _ = q.shape
    sizes = _sizes(q, k, v, v_dim, indices, 64)
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    _forward_kernel[(tokens, triton.cdiv(sizes["GROUP"], sizes["BLOCK_H"]), k.shape[1])](
        q, k, v, indices, out, lse, scale, *_strides(k), *_strides(v), heads,
        BLOCK_K=64, num_warps=8, num_stages=2, **sizes,
    )  # fmt: skip
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `q`, `k` and `v`; the last two are sums in no fixed order."""
    tokens, heads, _ = q.shape
    sizes = _sizes(q, k, v, out.shape[2], indices, 32)
    delta = (out.float() * d_out.float()).sum(dim=2)
    d_q, d_k = torch.empty_like(q), torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    d_v = None if v is None else torch.zeros(v.shape, dtype=torch.float32, device=q.device)
    _backward_kernel[(tokens, triton.cdiv(sizes["GROUP"], sizes["BLOCK_H"]), k.shape[1])](
        q, k, v, indices, lse, delta, d_out, d_q, d_k, d_v, scale, *_strides(k), *_strides(v), heads, k.shape[1],
        BLOCK_K=32, num_warps=8, num_stages=2, **sizes,
    )  # fmt: skip
    return d_q, d_k.to(k.dtype), None if v is None or d_v is None else d_v.to(v.dtype)


def _sizes(q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, block_h: int) -> dict[str, Any]:
    """Compile-time sizes of both kernels."""
    return {
        **head_sizes(q, k.shape[1], block_h),
        "TOPK": indices.shape[1],
        "V_DIM": v_dim,
        "V_PADDED": max(16, triton.next_power_of_2(v_dim)),
        "SHARED": v is None,
    }


def _strides(item: Tensor | None) -> tuple[int, int]:
    """Of rows and heads."""
    return (0, 0) if item is None else (item.stride(0), item.stride(1))


class SparseAttention(torch.autograd.Function):
    """The kernels for autograd, with `flash` FlashMLA forward; no gradient flows through the second result."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, indices: Tensor, scale: float, flash: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash_mla.forward(q, k, indices, scale) if flash else forward(q, k, v, v_dim, indices, scale)
        ctx.save_for_backward(q, k, v, indices, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, indices, out, lse = ctx.saved_tensors
        d_q, d_k, d_v = backward(q, k, v, indices, ctx.scale, out, lse, d_out.contiguous())
        return d_q, d_k, d_v, None, None, None, None
