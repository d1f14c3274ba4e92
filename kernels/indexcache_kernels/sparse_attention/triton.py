"""Online softmax over gathered keys: nothing has the size of the context, and no gathered copy is made."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 64  # keys a step


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    indices,
    out,
    lse,
    scale,
    q_row,
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
    queries = q + token * q_row + head[:, None] * DIM
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


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `indexcache_kernels.sparse_attention`."""
    tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[1:]
    group = heads // kv_heads
    main = max(16, 1 << (dim.bit_length() - 1))
    tail = max(16, triton.next_power_of_2(max(0, dim - main)))
    shared = v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v_dim == main
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    block_h = min(64, max(16, triton.next_power_of_2(group)))
    _forward_kernel[(tokens, triton.cdiv(group, block_h), kv_heads)](
        q,
        k,
        v,
        indices,
        out,
        lse,
        scale,
        q.stride(0),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        heads,
        GROUP=group,
        TOPK=indices.shape[1],
        DIM=dim,
        MAIN=main,
        TAIL=tail,
        V_DIM=v_dim,
        V_PADDED=max(16, triton.next_power_of_2(v_dim)),
        SHARED=shared,
        BLOCK_H=block_h,
        BLOCK_K=BLOCK_K,
        UPCAST=q.dtype == torch.bfloat16 and not q.is_cuda,  # Triton's interpreter multiplies the bits
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8,
        num_stages=2,
    )
    return out, lse
