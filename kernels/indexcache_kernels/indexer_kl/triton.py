"""Both distributions a block of keys at a time; the gradient computes them again."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import head_sizes, load_heads, load_rows, products


@triton.jit
def _keys(indices, token, start, at, count, BLOCK: tl.constexpr, SELECTED: tl.constexpr, TOPK: tl.constexpr):
    """A block of keys of one query, -1 for none: what was selected, or all from `start` on."""
    place = at + tl.arange(0, BLOCK)
    if SELECTED:
        return tl.load(indices + token * TOPK + place, mask=place < TOPK, other=-1).to(tl.int64)
    return tl.where(place < count, start + place, -1).to(tl.int64)


@triton.jit
def _target(q, k, lse, key, token, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
            MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr, UPCAST: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Mean over heads of the attention that one query pays to a block of keys."""
    total = tl.zeros((key.shape[0],), tl.float32)
    for kv_head in range(HEADS // GROUP):
        k_main, k_tail = load_heads(k + (key * (HEADS // GROUP) + kv_head) * DIM, key >= 0, DIM, MAIN, TAIL, UPCAST)
        for first in range(0, GROUP, BLOCK_H):
            member = first + tl.arange(0, BLOCK_H)
            head = token * HEADS + kv_head * GROUP + member
            q_main, q_tail = load_heads(q + head * DIM, member < GROUP, DIM, MAIN, TAIL, UPCAST)
            score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)
            base = tl.load(lse + head, mask=member < GROUP, other=float("inf"))
            total += tl.sum(tl.exp(score - base[:, None]), 0)
    return tl.where(key >= 0, total / HEADS, 0.0)


@triton.jit
def _forward_kernel(
    q, k, lse, scale, index_q, index_k, weights, starts, ends, indices, loss, index_lse,
    SELECTED: tl.constexpr, TOPK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr, INDEXERS: tl.constexpr, INDEX_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The divergence of one query, and the logarithm of the denominator of its index scores."""
    token = tl.program_id(0).to(tl.int64)
    start, count = 0, TOPK
    if not SELECTED:
        start = tl.load(starts + token)
        count = tl.load(ends + token) - start
    row = tl.arange(0, BLOCK_I)
    queries = load_rows(index_q + (token * INDEXERS + row) * INDEX_DIM, row < INDEXERS, INDEX_DIM, BLOCK_C, UPCAST)
    weight = tl.load(weights + token * INDEXERS + row, mask=row < INDEXERS, other=0.0)
    highest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    entropy, cross = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for at in range(0, count, BLOCK_K):
        key = _keys(indices, token, start, at, count, BLOCK_K, SELECTED, TOPK)
        target = _target(q, k, lse, key, token, scale, HEADS, GROUP, DIM, MAIN, TAIL, BLOCK_H, UPCAST, PRECISION)
        vectors = load_rows(index_k + key * INDEX_DIM, key >= 0, INDEX_DIM, BLOCK_C, UPCAST)
        product = tl.dot(queries, tl.trans(vectors), input_precision=PRECISION)
        score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
        entropy += tl.sum(tl.where(target > 0, target * tl.log(tl.where(target > 0, target, 1.0)), 0.0))
        cross += tl.sum(target * score)
        score = tl.where(key >= 0, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(score - base), 0)
        highest = higher
    denominator = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(loss + token, entropy - cross + denominator)
    tl.store(index_lse + token, denominator)


@triton.jit
def _backward_kernel(
    q, k, lse, scale, index_q, index_k, weights, starts, ends, indices, index_lse, d_loss, d_q, d_k, d_weights,
    SELECTED: tl.constexpr, TOPK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr, INDEXERS: tl.constexpr, INDEX_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients from one query: the index scores' is softmax - target; those of keys are added up in memory."""
    token = tl.program_id(0).to(tl.int64)
    start, count = 0, TOPK
    if not SELECTED:
        start = tl.load(starts + token)
        count = tl.load(ends + token) - start
    row, dim = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_C)
    place = (token * INDEXERS + row[:, None]) * INDEX_DIM + dim[None, :]
    there = (row < INDEXERS)[:, None] & (dim < INDEX_DIM)[None, :]
    queries = load_rows(index_q + (token * INDEXERS + row) * INDEX_DIM, row < INDEXERS, INDEX_DIM, BLOCK_C, UPCAST)
    weight = tl.load(weights + token * INDEXERS + row, mask=row < INDEXERS, other=0.0)
    base, upstream = tl.load(index_lse + token), tl.load(d_loss + token)
    dq = tl.zeros((BLOCK_I, BLOCK_C), tl.float32)
    dw = tl.zeros((BLOCK_I,), tl.float32)
    for at in range(0, count, BLOCK_K):
        key = _keys(indices, token, start, at, count, BLOCK_K, SELECTED, TOPK)
        target = _target(q, k, lse, key, token, scale, HEADS, GROUP, DIM, MAIN, TAIL, BLOCK_H, UPCAST, PRECISION)
        exists = (key >= 0)[:, None] & (dim < INDEX_DIM)[None, :]
        vectors = load_rows(index_k + key * INDEX_DIM, key >= 0, INDEX_DIM, BLOCK_C, UPCAST)
        product = tl.dot(queries, tl.trans(vectors), input_precision=PRECISION)
        positive = tl.maximum(product, 0.0)
        score = tl.sum(positive * weight[:, None], 0)
        change = upstream * (tl.where(key >= 0, tl.exp(score - base), 0.0) - target)
        dw += tl.sum(positive * change[None, :], 1)
        inner = tl.where(product > 0, weight[:, None] * change[None, :], 0.0).to(vectors.dtype)
        dq = tl.dot(inner, vectors, dq, input_precision=PRECISION)
        back = tl.dot(tl.trans(inner), queries, input_precision=PRECISION)
        tl.atomic_add(d_k + key[:, None] * INDEX_DIM + dim[None, :], back, mask=exists, sem="relaxed")
    tl.store(d_q + place, dq.to(d_q.dtype.element_ty), mask=there)
    tl.store(d_weights + token * INDEXERS + row, dw, mask=row < INDEXERS)


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
        given = (q, k, lse, scale, index_q, index_k, weights, starts, ends, indices)
        sizes = _sizes(q, k, index_q, indices)
        _forward_kernel[(len(q),)](*given, loss, index_lse, **sizes)
        ctx.save_for_backward(q, k, lse, index_q, index_k, weights, starts, ends, indices, index_lse)
        ctx.scale, ctx.sizes = scale, sizes
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        q, k, lse, index_q, index_k, weights, starts, ends, indices, index_lse = ctx.saved_tensors
        d_q, d_weights = torch.empty_like(index_q), torch.empty_like(weights)
        d_k = torch.zeros(index_k.shape, dtype=torch.float32, device=q.device)
        given = (q, k, lse, ctx.scale, index_q, index_k, weights, starts, ends, indices, index_lse)
        _backward_kernel[(len(q),)](*given, d_loss.contiguous(), d_q, d_k, d_weights, **ctx.sizes)
        return None, None, None, None, d_q, d_k.to(index_k.dtype), d_weights, None, None, None
