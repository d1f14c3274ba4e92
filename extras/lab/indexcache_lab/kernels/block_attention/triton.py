"""Online softmax over the tokens of chosen blocks: no gathered copy is made; gradients have the size of the cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import head_sizes, load_heads, load_rows, products


@triton.jit
def _tokens(blocks_ptr, row, slot, length, N: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the tokens in these slots of a row of blocks, `[BLOCK_K]`, and which of them exist."""
    number = slot // BLOCK_TOKENS
    block = tl.load(blocks_ptr + row * N + number, mask=number < N, other=-1).to(tl.int64)
    token = block * BLOCK_TOKENS + slot % BLOCK_TOKENS
    return token, (block >= 0) & (token < length)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, blocks_ptr, lengths_ptr, out_ptr, lse_ptr, scale,
    k_batch_stride, k_head_stride, k_row_stride, v_batch_stride, v_head_stride, v_row_stride,
    bias_batch_stride, bias_head_stride, num_heads, queries,
    GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, N: tl.constexpr, BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from one query, with up to BLOCK_H heads that share their keys."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    request, length = row // queries, tl.load(lengths_ptr + row)
    blocks_row = row * BLOCK_ROWS + (kv_head if BLOCK_ROWS > 1 else 0)
    group_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head = row * num_heads + kv_head * GROUP + group_head
    head_mask, value_dim = group_head < GROUP, tl.arange(0, V_PADDED)
    keys = k_ptr + request * k_batch_stride + kv_head * k_head_stride
    values = v_ptr + request * v_batch_stride + kv_head * v_head_stride
    q_main, q_tail = load_heads(q_ptr + head * DIM, head_mask, DIM, MAIN, TAIL, UPCAST)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)  # [BLOCK_H]
    total = tl.zeros((BLOCK_H,), tl.float32)  # [BLOCK_H]
    mean = tl.zeros((BLOCK_H, V_PADDED), tl.float32)  # [BLOCK_H, V_PADDED]
    for first in range(0, N * BLOCK_TOKENS, BLOCK_K):
        token, live = _tokens(blocks_ptr, blocks_row, first + tl.arange(0, BLOCK_K), length, N, BLOCK_TOKENS)
        k_main, k_tail = load_heads(keys + token * k_row_stride, live, DIM, MAIN, TAIL, UPCAST)
        value = load_rows(values + token * v_row_stride, live, V_DIM, V_PADDED, UPCAST)  # [BLOCK_K, V_PADDED]
        score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)  # [BLOCK_H, BLOCK_K]
        if BIASED:
            offset = request * bias_batch_stride + kv_head * bias_head_stride + token
            score += tl.load(bias_ptr + offset, mask=live, other=0.0)[None, :]
        score = tl.where(live[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(highest - base)  # [BLOCK_H]
        weight = tl.exp(score - base[:, None])  # [BLOCK_H, BLOCK_K]
        total = total * shrink + tl.sum(weight, 1)
        mean = tl.dot(weight.to(value.dtype), value, mean * shrink[:, None], input_precision=PRECISION)
        highest = higher
    total = tl.where(total == 0.0, 1.0, total)  # of a query without a block
    mean = mean / total[:, None]
    out_ptrs = out_ptr + head[:, None] * V_DIM + value_dim[None, :]
    tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=head_mask[:, None] & (value_dim < V_DIM)[None, :])
    tl.store(lse_ptr + head, highest + tl.log(total), mask=head_mask)


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, blocks_ptr, lengths_ptr, lse_ptr, delta_ptr, d_out_ptr,
    d_q_ptr, d_k_ptr, d_v_ptr, d_bias_ptr, scale,
    k_batch_stride, k_head_stride, k_row_stride, v_batch_stride, v_head_stride, v_row_stride,
    bias_batch_stride, bias_head_stride, num_heads, num_kv_heads, queries, room,
    GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, N: tl.constexpr, BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients from one query and up to BLOCK_H heads; add those of the cache and its bias in memory."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    request, length = row // queries, tl.load(lengths_ptr + row)
    blocks_row = row * BLOCK_ROWS + (kv_head if BLOCK_ROWS > 1 else 0)
    group_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head = row * num_heads + kv_head * GROUP + group_head
    main, tail, value_dim = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL), tl.arange(0, V_PADDED)
    main_mask, tail_mask, head_mask = (main < DIM)[None, :], (tail < DIM)[None, :], group_head < GROUP
    keys = k_ptr + request * k_batch_stride + kv_head * k_head_stride
    values = v_ptr + request * v_batch_stride + kv_head * v_head_stride
    q_main, q_tail = load_heads(q_ptr + head * DIM, head_mask, DIM, MAIN, TAIL, UPCAST)
    grad = load_rows(d_out_ptr + head * V_DIM, head_mask, V_DIM, V_PADDED, UPCAST)  # [BLOCK_H, V_PADDED]
    base = tl.load(lse_ptr + head, mask=head_mask, other=0.0)
    base = tl.where(base == float("-inf"), 0.0, base)
    mean = tl.load(delta_ptr + head, mask=head_mask, other=0.0)
    dq_main = tl.zeros((BLOCK_H, MAIN), tl.float32)  # [BLOCK_H, MAIN]
    dq_tail = tl.zeros((BLOCK_H, TAIL), tl.float32)  # [BLOCK_H, TAIL]
    for first in range(0, N * BLOCK_TOKENS, BLOCK_K):
        token, live = _tokens(blocks_ptr, blocks_row, first + tl.arange(0, BLOCK_K), length, N, BLOCK_TOKENS)
        k_main, k_tail = load_heads(keys + token * k_row_stride, live, DIM, MAIN, TAIL, UPCAST)
        value = load_rows(values + token * v_row_stride, live, V_DIM, V_PADDED, UPCAST)  # [BLOCK_K, V_PADDED]
        score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)  # [BLOCK_H, BLOCK_K]
        if BIASED:
            offset = request * bias_batch_stride + kv_head * bias_head_stride + token
            score += tl.load(bias_ptr + offset, mask=live, other=0.0)[None, :]
        weight = tl.where(live[None, :] & head_mask[:, None], tl.exp(score - base[:, None]), 0.0)
        d_score = tl.dot(grad, tl.trans(value), input_precision=PRECISION)  # [BLOCK_H, BLOCK_K]
        d_score = weight * (d_score - mean[:, None])
        grad_row = (request * num_kv_heads + kv_head) * room + token  # [BLOCK_K], of the gradients of the cache
        if BIASED:
            tl.atomic_add(d_bias_ptr + grad_row, tl.sum(d_score, 0), live, sem="relaxed")
        d_score = (d_score * scale).to(k_main.dtype)
        dq_main = tl.dot(d_score, k_main, dq_main, input_precision=PRECISION)
        dq_tail = tl.dot(d_score, k_tail, dq_tail, input_precision=PRECISION)
        d_key = tl.dot(tl.trans(d_score), q_main, input_precision=PRECISION)  # [BLOCK_K, MAIN]
        ptrs = d_k_ptr + grad_row[:, None] * DIM
        tl.atomic_add(ptrs + main[None, :], d_key, live[:, None] & main_mask, sem="relaxed")
        d_key = tl.dot(tl.trans(d_score), q_tail, input_precision=PRECISION)  # [BLOCK_K, TAIL]
        tl.atomic_add(ptrs + tail[None, :], d_key, live[:, None] & tail_mask, sem="relaxed")
        d_value = tl.dot(tl.trans(weight.to(grad.dtype)), grad, input_precision=PRECISION)  # [BLOCK_K, V_PADDED]
        ptrs = d_v_ptr + grad_row[:, None] * V_DIM + value_dim[None, :]
        tl.atomic_add(ptrs, d_value, live[:, None] & (value_dim < V_DIM)[None, :], sem="relaxed")
    ptrs = d_q_ptr + head[:, None] * DIM
    tl.store(ptrs + main[None, :], dq_main.to(d_q_ptr.dtype.element_ty), mask=head_mask[:, None] & main_mask)
    tl.store(ptrs + tail[None, :], dq_tail.to(d_q_ptr.dtype.element_ty), mask=head_mask[:, None] & tail_mask)


def _sizes(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, blocks: Tensor, block_tokens: int, block_h: int
) -> dict[str, Any]:
    """Return the sizes and strides that both kernels take."""
    tensors = {"k": k.stride(), "v": v.stride(), "bias": (0, 0) if bias is None else bias.stride()}
    axes = {"k": ("batch", "head", "row"), "v": ("batch", "head", "row"), "bias": ("batch", "head")}
    strides = {
        f"{name}_{axis}_stride": stride
        for name, own in tensors.items()
        for axis, stride in zip(axes[name], own, strict=False)
    }
    return {
        **strides,
        **head_sizes(q.flatten(0, 1), k.shape[1], block_h),
        "num_heads": q.shape[2],
        "queries": q.shape[1],
        "BLOCK_ROWS": blocks.shape[2] if blocks.ndim == 4 else 1,  # of a query: one, or one for each key head
        "N": blocks.shape[-1],
        "BLOCK_TOKENS": block_tokens,
        "V_DIM": v.shape[3],
        "V_PADDED": max(16, triton.next_power_of_2(v.shape[3])),
        "BIASED": bias is not None,
    }


class BlockAttention(torch.autograd.Function):
    """The kernels for autograd; gradients of the cache and its bias are sums in no fixed order."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        blocks: Tensor,
        lengths: Tensor,
        scale: float,
        block_tokens: int,
    ) -> Tensor:
        """Attend, and keep what the gradients need."""
        rows, heads = q.shape[0] * q.shape[1], q.shape[2]
        sizes = _sizes(q, k, v, bias, blocks, block_tokens, 64)
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        _forward_kernel[(rows, triton.cdiv(sizes["GROUP"], sizes["BLOCK_H"]), k.shape[1])](
            q_ptr=q, k_ptr=k, v_ptr=v, bias_ptr=bias, blocks_ptr=blocks, lengths_ptr=lengths, out_ptr=out, lse_ptr=lse,
            scale=scale, BLOCK_K=64, num_warps=4, num_stages=2, **sizes,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, bias, blocks, lengths, out, lse)
        ctx.scale, ctx.block_tokens = scale, block_tokens
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `q`, `k`, `v` and `bias`."""
        q, k, v, bias, blocks, lengths, out, lse = ctx.saved_tensors
        rows, sizes = q.shape[0] * q.shape[1], _sizes(q, k, v, bias, blocks, ctx.block_tokens, 32)
        delta, d_q = (out.float() * d_out.float()).sum(dim=3), torch.empty_like(q)
        d_k, d_v = (torch.zeros(item.shape, dtype=torch.float32, device=q.device) for item in (k, v))
        d_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=q.device)
        _backward_kernel[(rows, triton.cdiv(sizes["GROUP"], sizes["BLOCK_H"]), k.shape[1])](
            q_ptr=q, k_ptr=k, v_ptr=v, bias_ptr=bias, blocks_ptr=blocks, lengths_ptr=lengths, lse_ptr=lse,
            delta_ptr=delta, d_out_ptr=d_out.contiguous(), d_q_ptr=d_q, d_k_ptr=d_k, d_v_ptr=d_v, d_bias_ptr=d_bias,
            scale=ctx.scale, num_kv_heads=k.shape[1], room=k.shape[2], BLOCK_K=32, num_warps=4, num_stages=2, **sizes,
        )  # fmt: skip
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype), d_bias, None, None, None, None
