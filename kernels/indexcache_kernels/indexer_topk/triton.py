"""Scores and an exact selection in one pass over the keys: only candidates are kept, never a row of scores.

See README.md beside this for the maths, the bytes and what was measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import arithmetic
from indexcache_kernels.indexer_topk.candidates import finish, shrink, take_sample, take_segment

BLOCK_K, WARPS, STAGES = 64, 4, 3
# By bytes of a number:
COLUMNS = {1: 128, 2: 128, 4: 32}  # pairs of query and head of a program
PROGRAMS = {1: 4, 2: 2, 4: 2}  # a multiprocessor; each takes the next block of queries when it is free
REGISTERS = {1: 128, 2: 255, 4: 255}  # a thread, so that as many programs fit
CHUNK = 128  # candidates that are looked for at a time
SEGMENT = 1024  # keys between two looks at what they scored; also how many keys are sampled


@triton.jit
def _products(
    q_ptr, weights_ptr, k_ptr, k_scale_ptr, scores_ptr, num_queries, first_key, step, stop,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENT: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores of the BLOCK_Q queries from `q` on and every `step`-th of SEGMENT keys, to `scores`, `[BLOCK_Q, SEGMENT]`.

    Keys are the rows of the product, so heads add up inside a thread. Queries are loaded here, each time: functions
    that are not inlined must find no shared memory in use; Triton 3.6 let them overwrite it (README.md).
    """
    row, dim = tl.arange(0, BLOCK_Q), tl.arange(0, PADDED_DIM)
    column = tl.arange(0, BLOCK_Q * PADDED_HEADS)  # [BLOCK_Q * PADDED_HEADS]
    head = column % PADDED_HEADS
    column_mask = (column // PADDED_HEADS < num_queries) & (head < HEADS)
    column_offset = column // PADDED_HEADS * HEADS + head
    query_columns = tl.load(
        q_ptr + column_offset[None, :] * DIM + dim[:, None], mask=column_mask[None, :] & (dim < DIM)[:, None], other=0.0
    )
    weight = tl.load(weights_ptr + column_offset, mask=column_mask, other=0.0)
    if UPCAST:
        query_columns = query_columns.to(tl.float32)
    for first in range(0, tl.minimum(SEGMENT, tl.cdiv(stop - first_key, step)), BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        key = first_key + slot * step
        key_mask = key < stop
        key_rows = tl.load(
            k_ptr + key.to(tl.int64)[:, None] * DIM + dim[None, :],
            mask=key_mask[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        if UPCAST:
            key_rows = key_rows.to(tl.float32)
        product = tl.dot(key_rows, query_columns, input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q * PADDED_HEADS]
        product = tl.maximum(product, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(product, (BLOCK_K, BLOCK_Q, PADDED_HEADS)), axis=2)  # [BLOCK_K, BLOCK_Q]
        if SCALED:
            score *= tl.load(k_scale_ptr + key, mask=key_mask, other=0.0)[:, None]
        tl.store(scores_ptr + row[None, :] * SEGMENT + slot[:, None], score)
    tl.debug_barrier()


@triton.jit
def _stream_kernel(
    q_ptr, k_ptr, weights_ptr, k_scale_ptr, starts_ptr, ends_ptr, scores_ptr, marks_ptr, candidates_ptr, counts_ptr,
    bounds_ptr, result_ptr, result_values_ptr, queue_ptr,
    num_queries, num_blocks,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENT: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
    TOPK: tl.constexpr, ROOM: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Takes BLOCK_Q queries and one of SPLITS parts of their keys at a time from the queue, the last queries first.

    Scores of a segment go to memory of the program's own, which stays in the cache. What is done with them is not
    inlined, to leave registers to the products.
    """
    program, row = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_Q)
    scores_ptr += program * BLOCK_Q * SEGMENT
    marks_ptr += program * BLOCK_Q * (SEGMENT // 16)
    counts_ptr += program * BLOCK_Q
    bounds_ptr += program * BLOCK_Q
    values_ptr = candidates_ptr + program * BLOCK_Q * ROOM * 2
    indices_ptr = values_ptr + BLOCK_Q * ROOM
    item = tl.atomic_add(queue_ptr, 1)
    while item < num_blocks * SPLITS:
        first, split = (num_blocks - 1 - item // SPLITS) * BLOCK_Q, item % SPLITS
        # 1. which queries, and which part of their keys
        query_mask = first + row < num_queries
        start = tl.load(starts_ptr + first + row, mask=query_mask, other=2147483647)
        end = tl.load(ends_ptr + first + row, mask=query_mask, other=0)
        lowest, highest = tl.min(start), tl.max(end)
        if SPLITS > 1:
            length = tl.cdiv(tl.cdiv(tl.maximum(highest - lowest, 0), SPLITS), BLOCK_K) * BLOCK_K
            lowest += split * length
            highest = tl.minimum(highest, lowest + length)
        visible = tl.maximum(tl.minimum(end, highest) - tl.maximum(start, lowest), 0)  # [BLOCK_Q], how many keys
        block_q_ptr = q_ptr + first.to(tl.int64) * (HEADS * DIM)
        block_weights_ptr = weights_ptr + first.to(tl.int64) * HEADS
        tl.debug_barrier()
        tl.store(bounds_ptr + row, float("-inf"))
        tl.debug_barrier()
        # 2. a bound from a sample, where not all keys fit among the candidates
        if highest - lowest > ROOM:
            step = (highest - lowest) // SEGMENT
            _products(
                q_ptr=block_q_ptr, weights_ptr=block_weights_ptr, k_ptr=k_ptr, k_scale_ptr=k_scale_ptr,
                scores_ptr=scores_ptr, num_queries=num_queries - first, first_key=lowest, step=step, stop=highest,
                HEADS=HEADS, PADDED_HEADS=PADDED_HEADS, DIM=DIM, PADDED_DIM=PADDED_DIM, BLOCK_Q=BLOCK_Q,
                BLOCK_K=BLOCK_K, SEGMENT=SEGMENT, SCALED=SCALED, PRECISION=PRECISION, UPCAST=UPCAST,
            )  # fmt: skip
            take_sample(
                scores_ptr=scores_ptr, bounds_ptr=bounds_ptr, starts_ptr=starts_ptr + first,
                ends_ptr=ends_ptr + first, num_queries=num_queries - first, lowest=lowest, highest=highest, step=step,
                BLOCK_Q=BLOCK_Q, SEGMENT=SEGMENT, TOPK=TOPK, ROOM=ROOM,
            )  # fmt: skip
        # 3. candidates of all segments
        attempt = 0
        while attempt < 2:
            tl.debug_barrier()
            tl.store(counts_ptr + row, 0)
            tl.debug_barrier()
            for segment in range(lowest, highest, SEGMENT):
                _products(
                    q_ptr=block_q_ptr, weights_ptr=block_weights_ptr, k_ptr=k_ptr, k_scale_ptr=k_scale_ptr,
                    scores_ptr=scores_ptr, num_queries=num_queries - first, first_key=segment, step=1, stop=highest,
                    HEADS=HEADS, PADDED_HEADS=PADDED_HEADS, DIM=DIM, PADDED_DIM=PADDED_DIM, BLOCK_Q=BLOCK_Q,
                    BLOCK_K=BLOCK_K, SEGMENT=SEGMENT, SCALED=SCALED, PRECISION=PRECISION, UPCAST=UPCAST,
                )  # fmt: skip
                take_segment(
                    scores_ptr=scores_ptr, marks_ptr=marks_ptr, values_ptr=values_ptr, indices_ptr=indices_ptr,
                    counts_ptr=counts_ptr, bounds_ptr=bounds_ptr, starts_ptr=starts_ptr + first,
                    ends_ptr=ends_ptr + first, num_queries=num_queries - first, segment=segment, highest=highest,
                    BLOCK_Q=BLOCK_Q, SEGMENT=SEGMENT, STEPS=STEPS, CHUNK=CHUNK, TOPK=TOPK, ROOM=ROOM,
                )  # fmt: skip
                tl.debug_barrier()
            missing = tl.minimum(visible, TOPK) - tl.load(counts_ptr + row)  # [BLOCK_Q]
            attempt += tl.where(tl.max(missing) > 0, 1, 2)  # the sample misled: once more, without a bound
            tl.debug_barrier()
            tl.store(bounds_ptr + row, float("-inf"))
        # 4. the best of them
        for query in range(tl.minimum(BLOCK_Q, num_queries - first)):
            result_offset = ((first + query).to(tl.int64) * SPLITS + split) * TOPK
            size = tl.load(counts_ptr + query)
            finish(
                values_ptr=values_ptr + query * ROOM, indices_ptr=indices_ptr + query * ROOM, count=size,
                result_ptr=result_ptr + result_offset, result_values_ptr=result_values_ptr + result_offset,
                MERGE=SPLITS > 1, TOPK=TOPK, ROOM=ROOM,
            )  # fmt: skip
        item = tl.atomic_add(queue_ptr, 1)


@triton.jit
def _merge_kernel(
    parts_ptr, part_values_ptr, candidates_ptr, counts_ptr, bounds_ptr, result_ptr, TOTAL: tl.constexpr,
    TOPK: tl.constexpr, ROOM: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """The best of what the parts of one query's keys have."""
    token = tl.program_id(0).to(tl.int64)
    values_ptr = candidates_ptr + token * ROOM * 2
    indices_ptr = values_ptr + ROOM
    counts_ptr += token
    row = tl.arange(0, 1)
    tl.store(counts_ptr + row, 0)
    for first in range(0, TOTAL, SEGMENT):
        slot = first + tl.arange(0, SEGMENT)  # [SEGMENT]
        index = tl.load(parts_ptr + token * TOTAL + slot, mask=slot < TOTAL, other=-1)
        flags = (index >= 0).to(tl.int32)  # [SEGMENT]
        value = tl.load(part_values_ptr + token * TOTAL + slot, mask=index >= 0, other=0)
        tl.debug_barrier()
        count, added = tl.load(counts_ptr), tl.sum(flags)
        if count + added > ROOM:
            shrink(values_ptr, indices_ptr, counts_ptr, bounds_ptr + token, TOPK, ROOM)
            tl.debug_barrier()
            count = tl.load(counts_ptr)
        to = count + tl.cumsum(flags, 0) - 1
        tl.store(values_ptr + to, value, mask=index >= 0)
        tl.store(indices_ptr + to, index, mask=index >= 0)
        tl.debug_barrier()
        tl.store(counts_ptr + row, count + added + tl.zeros_like(row))
    tl.debug_barrier()
    own_result_ptr = result_ptr + token * TOPK
    finish(
        values_ptr=values_ptr, indices_ptr=indices_ptr, count=tl.load(counts_ptr), result_ptr=own_result_ptr,
        result_values_ptr=own_result_ptr, MERGE=False, TOPK=TOPK, ROOM=ROOM,
    )  # fmt: skip


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `indexcache_kernels.indexer_topk`; `splits` says into how many parts the keys of a query are split."""
    queries, heads, dim = q.shape
    selected = torch.empty((queries, topk), dtype=torch.int32, device=q.device)
    if not queries:
        return selected
    padded_heads = max(4, triton.next_power_of_2(heads))
    block_q = max(1, min(4, COLUMNS[k.itemsize] // padded_heads))
    blocks = triton.cdiv(queries, block_q)
    room = 2 * max(SEGMENT, triton.next_power_of_2(topk))  # a whole segment fits beside the best
    programs = (
        PROGRAMS[k.itemsize] * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    )
    if splits is None:
        splits = max(1, min(programs // blocks, len(k) // (4 * room)))
    programs = min(programs, blocks * splits)
    sets = max(programs * block_q, queries if splits > 1 else 0)  # the merge has one of its own for each query

    def workspace(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    parts, part_values = workspace(2, queries, splits, topk) if splits > 1 else (selected, selected)
    candidates, counts, bounds = workspace(sets, 2, room), workspace(sets), workspace(sets, dtype=torch.float32)
    _stream_kernel[(programs,)](
        q_ptr=q, k_ptr=k, weights_ptr=weights, k_scale_ptr=k if k_scale is None else k_scale, starts_ptr=starts,
        ends_ptr=ends, scores_ptr=workspace(programs, block_q, SEGMENT, dtype=torch.float32),
        marks_ptr=workspace(programs, block_q, SEGMENT // 16), candidates_ptr=candidates, counts_ptr=counts,
        bounds_ptr=bounds, result_ptr=parts, result_values_ptr=part_values,
        queue_ptr=torch.zeros(1, dtype=torch.int32, device=q.device), num_queries=queries, num_blocks=blocks,
        HEADS=heads, PADDED_HEADS=padded_heads, DIM=dim,
        PADDED_DIM=max(32 if k.itemsize == 1 else 16, triton.next_power_of_2(dim)), BLOCK_Q=block_q, BLOCK_K=BLOCK_K,
        SEGMENT=SEGMENT, TOPK=topk, ROOM=room, STEPS=(SEGMENT // 16).bit_length() - 1, CHUNK=min(CHUNK, SEGMENT),
        SPLITS=splits, SCALED=k_scale is not None, **arithmetic(q), num_warps=WARPS, num_stages=STAGES,
        maxnreg=REGISTERS[k.itemsize],
    )  # fmt: skip
    if splits > 1:
        total = splits * topk
        _merge_kernel[(queries,)](
            parts, part_values, candidates, counts, bounds, selected, TOTAL=total, TOPK=topk, ROOM=room, SEGMENT=SEGMENT
        )
    return selected
