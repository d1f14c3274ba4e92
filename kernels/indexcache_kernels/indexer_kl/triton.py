"""Both distributions a block of keys at a time; the gradient computes them again."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import head_sizes, load_heads, load_rows, products


@triton.jit
def _keys(indices_ptr, token, start, first, count, BLOCK: tl.constexpr, SELECTED: tl.constexpr, TOPK: tl.constexpr):
    """A block of keys of one query, -1 for none: what was selected, or all from `start` on."""
    slot = first + tl.arange(0, BLOCK)  # [BLOCK]
    if SELECTED:
        return tl.load(indices_ptr + token * TOPK + slot, mask=slot < TOPK, other=-1).to(tl.int64)
    return tl.where(slot < count, start + slot, -1).to(tl.int64)


@triton.jit
def _target(q_ptr, k_ptr, lse_ptr, key, token, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
            MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr, UPCAST: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Mean over heads of the attention that one query pays to a block of keys."""
    total = tl.zeros((key.shape[0],), tl.float32)  # [BLOCK_K]
    for kv_head in range(HEADS // GROUP):
        k_main, k_tail = load_heads(k_ptr + (key * (HEADS // GROUP) + kv_head) * DIM, key >= 0, DIM, MAIN, TAIL, UPCAST)
        for first_head in range(0, GROUP, BLOCK_H):
            group_head = first_head + tl.arange(0, BLOCK_H)  # [BLOCK_H]
            head_offset = token * HEADS + kv_head * GROUP + group_head
            q_main, q_tail = load_heads(q_ptr + head_offset * DIM, group_head < GROUP, DIM, MAIN, TAIL, UPCAST)
            score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)  # [BLOCK_H, BLOCK_K]
            base = tl.load(lse_ptr + head_offset, mask=group_head < GROUP, other=float("inf"))
            total += tl.sum(tl.exp(score - base[:, None]), 0)
    return tl.where(key >= 0, total / HEADS, 0.0)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, lse_ptr, scale, index_q_ptr, index_k_ptr, weights_ptr, starts_ptr, ends_ptr, indices_ptr,
    loss_ptr, index_lse_ptr,
    SELECTED: tl.constexpr, TOPK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr, INDEXERS: tl.constexpr, INDEX_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The divergence of one query, and the logarithm of the denominator of its index scores."""
    token = tl.program_id(0).to(tl.int64)
    start, count = 0, TOPK
    if not SELECTED:
        start = tl.load(starts_ptr + token)
        count = tl.load(ends_ptr + token) - start
    indexer = tl.arange(0, BLOCK_I)  # [BLOCK_I]
    index_queries = load_rows(
        index_q_ptr + (token * INDEXERS + indexer) * INDEX_DIM, indexer < INDEXERS, INDEX_DIM, BLOCK_C, UPCAST
    )
    weight = tl.load(weights_ptr + token * INDEXERS + indexer, mask=indexer < INDEXERS, other=0.0)
    highest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    entropy, cross = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, count, BLOCK_K):
        key = _keys(
            indices_ptr=indices_ptr, token=token, start=start, first=first, count=count, BLOCK=BLOCK_K,
            SELECTED=SELECTED, TOPK=TOPK,
        )  # [BLOCK_K]  # fmt: skip
        target = _target(
            q_ptr=q_ptr, k_ptr=k_ptr, lse_ptr=lse_ptr, key=key, token=token, scale=scale, HEADS=HEADS, GROUP=GROUP,
            DIM=DIM, MAIN=MAIN, TAIL=TAIL, BLOCK_H=BLOCK_H, UPCAST=UPCAST, PRECISION=PRECISION,
        )  # fmt: skip
        # [BLOCK_K, BLOCK_C]:
        index_keys = load_rows(index_k_ptr + key * INDEX_DIM, key >= 0, INDEX_DIM, BLOCK_C, UPCAST)
        product = tl.dot(index_queries, tl.trans(index_keys), input_precision=PRECISION)  # [BLOCK_I, BLOCK_K]
        score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)  # [BLOCK_K]
        entropy += tl.sum(tl.where(target > 0, target * tl.log(tl.where(target > 0, target, 1.0)), 0.0))
        cross += tl.sum(target * score)
        # the denominator, kept relative to the highest score so far
        score = tl.where(key >= 0, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(score - base), 0)
        highest = higher
    denominator = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(loss_ptr + token, entropy - cross + denominator)
    tl.store(index_lse_ptr + token, denominator)


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, lse_ptr, scale, index_q_ptr, index_k_ptr, weights_ptr, starts_ptr, ends_ptr, indices_ptr,
    index_lse_ptr, d_loss_ptr, d_q_ptr, d_k_ptr, d_weights_ptr,
    SELECTED: tl.constexpr, TOPK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr, INDEXERS: tl.constexpr, INDEX_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients from one query: the index scores' is softmax - target; those of keys are added up in memory."""
    token = tl.program_id(0).to(tl.int64)
    start, count = 0, TOPK
    if not SELECTED:
        start = tl.load(starts_ptr + token)
        count = tl.load(ends_ptr + token) - start
    indexer, dim = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_C)  # [BLOCK_I], [BLOCK_C]
    index_offsets = (token * INDEXERS + indexer[:, None]) * INDEX_DIM + dim[None, :]  # [BLOCK_I, BLOCK_C]
    index_mask = (indexer < INDEXERS)[:, None] & (dim < INDEX_DIM)[None, :]
    index_queries = load_rows(
        index_q_ptr + (token * INDEXERS + indexer) * INDEX_DIM, indexer < INDEXERS, INDEX_DIM, BLOCK_C, UPCAST
    )
    weight = tl.load(weights_ptr + token * INDEXERS + indexer, mask=indexer < INDEXERS, other=0.0)
    base, upstream = tl.load(index_lse_ptr + token), tl.load(d_loss_ptr + token)
    dq = tl.zeros((BLOCK_I, BLOCK_C), tl.float32)
    dw = tl.zeros((BLOCK_I,), tl.float32)
    for first in range(0, count, BLOCK_K):
        key = _keys(
            indices_ptr=indices_ptr, token=token, start=start, first=first, count=count, BLOCK=BLOCK_K,
            SELECTED=SELECTED, TOPK=TOPK,
        )  # [BLOCK_K]  # fmt: skip
        target = _target(
            q_ptr=q_ptr, k_ptr=k_ptr, lse_ptr=lse_ptr, key=key, token=token, scale=scale, HEADS=HEADS, GROUP=GROUP,
            DIM=DIM, MAIN=MAIN, TAIL=TAIL, BLOCK_H=BLOCK_H, UPCAST=UPCAST, PRECISION=PRECISION,
        )  # fmt: skip
        key_mask = (key >= 0)[:, None] & (dim < INDEX_DIM)[None, :]  # [BLOCK_K, BLOCK_C]
        # [BLOCK_K, BLOCK_C]:
        index_keys = load_rows(index_k_ptr + key * INDEX_DIM, key >= 0, INDEX_DIM, BLOCK_C, UPCAST)
        product = tl.dot(index_queries, tl.trans(index_keys), input_precision=PRECISION)  # [BLOCK_I, BLOCK_K]
        positive = tl.maximum(product, 0.0)
        score = tl.sum(positive * weight[:, None], 0)  # [BLOCK_K]
        d_score = upstream * (tl.where(key >= 0, tl.exp(score - base), 0.0) - target)  # [BLOCK_K]
        dw += tl.sum(positive * d_score[None, :], 1)
        d_product = tl.where(product > 0, weight[:, None] * d_score[None, :], 0.0).to(index_keys.dtype)
        dq = tl.dot(d_product, index_keys, dq, input_precision=PRECISION)
        d_key = tl.dot(tl.trans(d_product), index_queries, input_precision=PRECISION)  # [BLOCK_K, BLOCK_C]
        tl.atomic_add(d_k_ptr + key[:, None] * INDEX_DIM + dim[None, :], d_key, mask=key_mask, sem="relaxed")
    tl.store(d_q_ptr + index_offsets, dq.to(d_q_ptr.dtype.element_ty), mask=index_mask)
    tl.store(d_weights_ptr + token * INDEXERS + indexer, dw, mask=indexer < INDEXERS)


def _sizes(q: Tensor, k: Tensor, index_q: Tensor, indices: Tensor | None) -> dict[str, Any]:
    """Compile-time sizes of both kernels, and how they are launched."""
    return {
        **head_sizes(q, k.shape[1], 64),
        "SELECTED": indices is not None,
        "TOPK": 0 if indices is None else indices.shape[1],
        "HEADS": q.shape[1],
        "INDEXERS": index_q.shape[1],
        "INDEX_DIM": index_q.shape[2],
        "BLOCK_I": max(16, triton.next_power_of_2(index_q.shape[1])),
        "BLOCK_C": max(16, triton.next_power_of_2(index_q.shape[2])),
        "BLOCK_K": 64,
        "num_warps": 8,
        "num_stages": 1,
    }


class IndexerKL(torch.autograd.Function):
    """The kernels for autograd; gradients flow into the indexer alone."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        scale: float,
        index_q: Tensor,
        index_k: Tensor,
        weights: Tensor,
        starts: Tensor | None,
        ends: Tensor | None,
        indices: Tensor | None,
    ) -> Tensor:
        loss, index_lse = (torch.empty(len(q), dtype=torch.float32, device=q.device) for _ in range(2))
        sizes = _sizes(q, k, index_q, indices)
        _forward_kernel[(len(q),)](
            q_ptr=q, k_ptr=k, lse_ptr=lse, scale=scale, index_q_ptr=index_q, index_k_ptr=index_k, weights_ptr=weights,
            starts_ptr=starts, ends_ptr=ends, indices_ptr=indices, loss_ptr=loss, index_lse_ptr=index_lse, **sizes,
        )  # fmt: skip
        ctx.save_for_backward(q, k, lse, index_q, index_k, weights, starts, ends, indices, index_lse)
        ctx.scale, ctx.sizes = scale, sizes
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        q, k, lse, index_q, index_k, weights, starts, ends, indices, index_lse = ctx.saved_tensors
        d_q, d_weights = torch.empty_like(index_q), torch.empty_like(weights)
        d_k = torch.zeros(index_k.shape, dtype=torch.float32, device=q.device)
        _backward_kernel[(len(q),)](
            q_ptr=q, k_ptr=k, lse_ptr=lse, scale=ctx.scale, index_q_ptr=index_q, index_k_ptr=index_k,
            weights_ptr=weights, starts_ptr=starts, ends_ptr=ends, indices_ptr=indices, index_lse_ptr=index_lse,
            d_loss_ptr=d_loss.contiguous(), d_q_ptr=d_q, d_k_ptr=d_k, d_weights_ptr=d_weights, **ctx.sizes,
        )  # fmt: skip
        return None, None, None, None, d_q, d_k.to(index_k.dtype), d_weights, None, None, None
