"""Both distributions, a block of keys at a time.

The gradient is computed with the loss, since both need the same products. The denominator of the index scores, which it
needs as well, is computed first, from index queries and keys alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import head_sizes, load_heads, load_rows, products


@triton.jit
def _key_range(starts_ptr, ends_ptr, token, SELECTED: tl.constexpr, TOPK: tl.constexpr):
    """Return where a query's keys begin and end: among those selected for it, or among all keys."""
    first, last = 0, TOPK
    if not SELECTED:
        first, last = tl.load(starts_ptr + token), tl.load(ends_ptr + token)
    return first, last


@triton.jit
def _key_block(indices_ptr, token, slot, last, SELECTED: tl.constexpr, TOPK: tl.constexpr):
    """Return a block of keys of one query, -1 for none."""
    if SELECTED:
        key = tl.load(indices_ptr + token * TOPK + slot, mask=slot < TOPK, other=-1)
    else:
        key = tl.where(slot < last, slot, -1)
    return key.to(tl.int64)


@triton.jit
def _denominator_kernel(
    index_q_ptr, index_k_ptr, weights_ptr, starts_ptr, ends_ptr, indices_ptr, index_lse_ptr,
    SELECTED: tl.constexpr, TOPK: tl.constexpr, INDEXERS: tl.constexpr, INDEX_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the logarithm of the denominator of one query's index scores, 0 where it sees nothing."""
    token = tl.program_id(0).to(tl.int64)
    first, last = _key_range(starts_ptr, ends_ptr, token, SELECTED, TOPK)
    indexer = tl.arange(0, BLOCK_I)  # [BLOCK_I]
    offset, mask = token * INDEXERS + indexer, indexer < INDEXERS
    index_queries = load_rows(index_q_ptr + offset * INDEX_DIM, mask, INDEX_DIM, BLOCK_C, UPCAST)
    weight = tl.load(weights_ptr + offset, mask=mask, other=0.0)
    highest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for begin in range(first, last, BLOCK_K):
        key = _key_block(indices_ptr, token, begin + tl.arange(0, BLOCK_K), last, SELECTED, TOPK)  # [BLOCK_K]
        index_keys = load_rows(index_k_ptr + key * INDEX_DIM, key >= 0, INDEX_DIM, BLOCK_C, UPCAST)
        product = tl.dot(index_queries, tl.trans(index_keys), input_precision=PRECISION)  # [BLOCK_I, BLOCK_K]
        score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)  # [BLOCK_K]
        score = tl.where(key >= 0, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(score - base), 0)
        highest = higher
    tl.store(index_lse_ptr + token, tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), 0.0))


@triton.jit
def _attended(q_main, q_tail, k_main, k_tail, lse, scale, PRECISION: tl.constexpr):
    """Sum the attention that heads pay to a block of keys."""
    return tl.sum(tl.exp(products(q_main, q_tail, k_main, k_tail, scale, PRECISION) - lse[:, None]), 0)


@triton.jit
def _compare_kernel(
    q_ptr, k_ptr, lse_ptr, scale, index_q_ptr, index_k_ptr, weights_ptr, starts_ptr, ends_ptr, indices_ptr,
    index_lse_ptr, loss_ptr, d_q_ptr, d_k_ptr, d_weights_ptr,
    GRADIENT: tl.constexpr, ONCE: tl.constexpr, SELECTED: tl.constexpr, TOPK: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr,
    INDEXERS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the divergence of one query, and with GRADIENT its gradient: softmax - target, in the index scores.

    The gradient of keys is added up in memory. With ONCE all heads fit, and their queries are loaded once.
    """
    token = tl.program_id(0).to(tl.int64)
    first, last = _key_range(starts_ptr, ends_ptr, token, SELECTED, TOPK)
    indexer, dim, head = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    index_offset, index_mask = token * INDEXERS + indexer, indexer < INDEXERS
    index_queries = load_rows(index_q_ptr + index_offset * INDEX_DIM, index_mask, INDEX_DIM, BLOCK_C, UPCAST)
    weight = tl.load(weights_ptr + index_offset, mask=index_mask, other=0.0)
    denominator = tl.load(index_lse_ptr + token)
    if ONCE:
        offset, mask = token * HEADS + head, head < GROUP
        q_main, q_tail = load_heads(q_ptr + offset * DIM, mask, DIM, MAIN, TAIL, UPCAST)
        lse = tl.load(lse_ptr + offset, mask=mask, other=float("inf"))
    loss = denominator
    dq = tl.zeros((BLOCK_I, BLOCK_C), tl.float32)
    dw = tl.zeros((BLOCK_I,), tl.float32)
    for begin in range(first, last, BLOCK_K):
        key = _key_block(indices_ptr, token, begin + tl.arange(0, BLOCK_K), last, SELECTED, TOPK)  # [BLOCK_K]
        target = tl.zeros((BLOCK_K,), tl.float32)
        for kv_head in range(HEADS // GROUP):
            keys = k_ptr + (key * (HEADS // GROUP) + kv_head) * DIM
            k_main, k_tail = load_heads(keys, key >= 0, DIM, MAIN, TAIL, UPCAST)
            if ONCE:
                target += _attended(q_main, q_tail, k_main, k_tail, lse, scale, PRECISION)
            else:
                for first_head in range(0, GROUP, BLOCK_H):
                    offset, mask = token * HEADS + kv_head * GROUP + first_head + head, first_head + head < GROUP
                    q_main, q_tail = load_heads(q_ptr + offset * DIM, mask, DIM, MAIN, TAIL, UPCAST)
                    lse = tl.load(lse_ptr + offset, mask=mask, other=float("inf"))
                    target += _attended(q_main, q_tail, k_main, k_tail, lse, scale, PRECISION)
        target = tl.where(key >= 0, target / HEADS, 0.0)
        index_keys = load_rows(index_k_ptr + key * INDEX_DIM, key >= 0, INDEX_DIM, BLOCK_C, UPCAST)
        product = tl.dot(index_queries, tl.trans(index_keys), input_precision=PRECISION)  # [BLOCK_I, BLOCK_K]
        positive = tl.maximum(product, 0.0)
        score = tl.sum(positive * weight[:, None], 0)  # [BLOCK_K]
        loss += tl.sum(tl.where(target > 0, target * (tl.log(tl.where(target > 0, target, 1.0)) - score), 0.0))
        if GRADIENT:
            d_score = tl.where(key >= 0, tl.exp(score - denominator), 0.0) - target  # [BLOCK_K]
            dw += tl.sum(positive * d_score[None, :], 1)
            d_product = tl.where(product > 0, weight[:, None] * d_score[None, :], 0.0).to(index_keys.dtype)
            dq = tl.dot(d_product, index_keys, dq, input_precision=PRECISION)
            d_key = tl.dot(tl.trans(d_product), index_queries, input_precision=PRECISION)  # [BLOCK_K, BLOCK_C]
            key_mask = (key >= 0)[:, None] & (dim < INDEX_DIM)[None, :]
            tl.atomic_add(d_k_ptr + key[:, None] * INDEX_DIM + dim[None, :], d_key, mask=key_mask, sem="relaxed")
    tl.store(loss_ptr + token, loss)
    if GRADIENT:
        ptrs = d_q_ptr + index_offset[:, None] * INDEX_DIM + dim[None, :]
        tl.store(ptrs, dq.to(d_q_ptr.dtype.element_ty), mask=index_mask[:, None] & (dim < INDEX_DIM)[None, :])
        tl.store(d_weights_ptr + index_offset, dw, mask=index_mask)


def _sizes(q: Tensor, k: Tensor, index_q: Tensor, indices: Tensor | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return compile-time sizes: those of both kernels, and those of the second alone."""
    heads = head_sizes(q, k.shape[1], 64)
    common = {
        "SELECTED": indices is not None,
        "TOPK": 0 if indices is None else indices.shape[1],
        "INDEXERS": index_q.shape[1],
        "INDEX_DIM": index_q.shape[2],
        "BLOCK_I": max(16, triton.next_power_of_2(index_q.shape[1])),
        "BLOCK_C": max(16, triton.next_power_of_2(index_q.shape[2])),
        "UPCAST": heads.pop("UPCAST"),
        "PRECISION": heads.pop("PRECISION"),
    }
    once = k.shape[1] == 1 and q.shape[1] <= heads["BLOCK_H"]
    return common, {**heads, "HEADS": q.shape[1], "ONCE": once}


class IndexerKL(torch.autograd.Function):
    """The kernels for autograd: the sum over queries, with gradients to the indexer alone, and each divergence."""

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
    ) -> tuple[Tensor, Tensor]:
        """Compute both results, and the gradients of their sum."""
        losses, index_lse = (torch.empty(len(q), dtype=torch.float32, device=q.device) for _ in range(2))
        common, heads = _sizes(q, k, index_q, indices)
        index = {"index_q_ptr": index_q, "index_k_ptr": index_k, "weights_ptr": weights}
        given = {**index, "starts_ptr": starts, "ends_ptr": ends, "indices_ptr": indices}
        _denominator_kernel[(len(q),)](
            **given, index_lse_ptr=index_lse, **common, BLOCK_K=128, num_warps=4, num_stages=2
        )
        ctx.compared = any(ctx.needs_input_grad)
        d_q, d_weights = torch.empty_like(index_q), torch.empty_like(weights)
        d_k = torch.zeros(index_k.shape, dtype=torch.float32, device=q.device)
        _compare_kernel[(len(q),)](
            q_ptr=q, k_ptr=k, lse_ptr=lse, scale=scale, **given, index_lse_ptr=index_lse, loss_ptr=losses,
            d_q_ptr=d_q, d_k_ptr=d_k, d_weights_ptr=d_weights, GRADIENT=ctx.compared, **common, **heads,
            BLOCK_K=32, num_warps=4, num_stages=2 if common["SELECTED"] or q.dtype == torch.float32 else 3,
        )  # fmt: skip
        if ctx.compared:
            ctx.save_for_backward(d_q, d_k.to(index_k.dtype), d_weights)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, change: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the indexer's queries, keys and weights."""
        d_q, d_k, d_weights = ctx.saved_tensors
        return None, None, None, None, d_q * change, d_k * change, d_weights * change, None, None, None
