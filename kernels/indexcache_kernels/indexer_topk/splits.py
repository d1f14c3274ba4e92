"""Few queries of many keys: a bound for each, parts of its keys for many programs, and their candidates merged."""

from __future__ import annotations

import triton
import triton.language as tl

from indexcache_kernels.indexer_topk.candidates import finish, shrink
from indexcache_kernels.indexer_topk.products import products


@triton.jit
def sample_kernel(
    q_ptr, k_ptr, weights_ptr, k_scale_ptr, starts_ptr, ends_ptr, sample_ptr,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROOM: tl.constexpr, SAMPLE: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Score SAMPLE evenly spaced keys of a query that sees more than ROOM; each program takes a part of them."""
    query, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts_ptr + query), tl.load(ends_ptr + query)
    if end - start > ROOM:
        step = (end - start) // SAMPLE
        products(
            q_ptr=q_ptr + query * (HEADS * DIM), weights_ptr=weights_ptr + query * HEADS, k_ptr=k_ptr,
            k_scale_ptr=k_scale_ptr, scores_ptr=sample_ptr + query * SAMPLE + part * (SAMPLE // PARTS), num_queries=1,
            first_key=start + part * (SAMPLE // PARTS) * step, step=step, stop=end, HEADS=HEADS,
            PADDED_HEADS=PADDED_HEADS, DIM=DIM, PADDED_DIM=PADDED_DIM, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
            SEGMENT=SAMPLE // PARTS, SCALED=SCALED, PRECISION=PRECISION, UPCAST=UPCAST,
        )  # fmt: skip


@triton.jit
def merge_kernel(
    candidates_ptr, counts_ptr, before_ptr, starts_ptr, ends_ptr, merged_ptr, merged_counts_ptr, bounds_ptr, todo_ptr,
    result_ptr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, STEPS: tl.constexpr, TOPK: tl.constexpr,
    ROOM: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Merge the candidates from the parts of one query's keys, in the order of the keys.

    `todo` becomes 0 where there are enough, and 2 where the sample misled.
    """
    token = tl.program_id(0).to(tl.int64)
    if tl.load(todo_ptr + token) != 0:
        values_ptr, row = merged_ptr + token * ROOM * 2, tl.arange(0, 1)
        indices_ptr = values_ptr + ROOM
        before_ptr += token * PADDED_SPLITS
        merged_counts_ptr += token
        split = tl.arange(0, PADDED_SPLITS)
        sizes = tl.load(counts_ptr + token * SPLITS + split, mask=split < SPLITS, other=0)  # [PADDED_SPLITS]
        total = tl.sum(sizes)
        tl.store(before_ptr + split, tl.cumsum(sizes, 0) - sizes)
        tl.store(merged_counts_ptr + row, 0)
        tl.debug_barrier()
        for first in range(0, total, SEGMENT):
            rank = first + tl.arange(0, SEGMENT)  # [SEGMENT]
            there = rank < total
            part = tl.zeros((SEGMENT,), tl.int32)  # the last one that has at most `rank` candidates before it
            for step in tl.static_range(STEPS):
                width = PADDED_SPLITS >> 1 >> step
                part += tl.where(there & (tl.load(before_ptr + part + width) <= rank), width, 0)
            source = (token * SPLITS + part) * (ROOM * 2) + rank - tl.load(before_ptr + part)
            value = tl.load(candidates_ptr + source, mask=there, other=0)
            index = tl.load(candidates_ptr + source + ROOM, mask=there, other=0)
            count, added = tl.load(merged_counts_ptr), tl.minimum(total - first, SEGMENT)
            if count + added > ROOM:
                shrink(values_ptr, indices_ptr, merged_counts_ptr, bounds_ptr + token, TOPK, ROOM)
                tl.debug_barrier()
                count = tl.load(merged_counts_ptr)
            tl.store(values_ptr + count + rank - first, value, mask=there)
            tl.store(indices_ptr + count + rank - first, index, mask=there)
            tl.debug_barrier()
            tl.store(merged_counts_ptr + row, count + added + tl.zeros_like(row))
            tl.debug_barrier()
        visible = tl.maximum(tl.load(ends_ptr + token) - tl.load(starts_ptr + token), 0)
        if total >= tl.minimum(visible, TOPK):
            finish(
                values_ptr=values_ptr, indices_ptr=indices_ptr, count=tl.load(merged_counts_ptr),
                result_ptr=result_ptr + token * TOPK, TOPK=TOPK, ROOM=ROOM,
            )  # fmt: skip
        tl.store(todo_ptr + token, tl.where(total >= tl.minimum(visible, TOPK), 0, 2))
