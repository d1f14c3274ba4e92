"""Scores and an exact selection in one pass over the keys: only candidates are kept, never a row of scores.

See README.md beside this for the maths, the bytes and what was measured.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import arithmetic
from indexcache_kernels.indexer_topk.candidates import finish, take_sample, take_segment
from indexcache_kernels.indexer_topk.products import products
from indexcache_kernels.indexer_topk.splits import merge_kernel, sample_kernel

BLOCK_K, WARPS, STAGES = 64, 4, 3
# By bytes of a number:
COLUMNS = {1: 128, 2: 128, 4: 32}  # pairs of query and head of a program
PROGRAMS = {1: 4, 2: 2, 4: 2}  # a multiprocessor; each takes the next block of queries when it is free
REGISTERS = {1: 128, 2: 255, 4: 255}  # a thread, so that as many programs fit
CHUNK = 128  # candidates that are looked for at a time
SEGMENT = 1024  # keys between two looks at what they scored; also how many keys are sampled
SAMPLE, SAMPLE_PARTS = 4096, 16  # keys that are sampled where those of a query are split, and programs that do it


@triton.jit
def _stream_kernel(
    q_ptr, k_ptr, weights_ptr, k_scale_ptr, starts_ptr, ends_ptr, scores_ptr, marks_ptr, candidates_ptr, counts_ptr,
    bounds_ptr, sample_ptr, todo_ptr, result_ptr, queue_ptr,
    num_queries, num_blocks,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENT: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
    TOPK: tl.constexpr, ROOM: tl.constexpr, SAMPLE: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Take BLOCK_Q queries at a time from the queue, the last ones first, and select their keys.

    With SPLITS above 1 a program has one of so many parts of one query's keys instead, and leaves its candidates to the
    merge. Scores of a segment go to memory of the program's own, which stays in the cache. The functions that read them
    are not inlined, to leave registers to the products.
    """
    program, row = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_Q)
    scores_ptr += program * BLOCK_Q * SEGMENT
    marks_ptr += program * BLOCK_Q * (SEGMENT // 16)
    counts_ptr += program * BLOCK_Q
    bounds_ptr += program * BLOCK_Q
    values_ptr = candidates_ptr + program * BLOCK_Q * ROOM * 2
    indices_ptr = values_ptr + BLOCK_Q * ROOM
    item = tl.atomic_add(queue_ptr, 1) if SPLITS == 1 else tl.program_id(0)
    while item < num_blocks * SPLITS:
        first = (num_blocks - 1 - item) * BLOCK_Q if SPLITS == 1 else item // SPLITS
        # 1. which queries, and which part of their keys
        query_mask = first + row < num_queries
        start = tl.load(starts_ptr + first + row, mask=query_mask, other=2147483647)
        end = tl.load(ends_ptr + first + row, mask=query_mask, other=0)
        lowest, highest = tl.min(start), tl.max(end)
        block_q_ptr = q_ptr + first.to(tl.int64) * (HEADS * DIM)
        block_weights_ptr = weights_ptr + first.to(tl.int64) * HEADS
        tl.debug_barrier()
        tl.store(bounds_ptr + row, float("-inf"))
        tl.debug_barrier()
        # 2. a bound from a sample, where not all keys fit among the candidates
        if SPLITS > 1:
            todo = tl.load(todo_ptr + first)
            if (highest - lowest > ROOM) & (todo == 1):
                take_sample(
                    scores_ptr=sample_ptr + first.to(tl.int64) * SAMPLE, bounds_ptr=bounds_ptr,
                    starts_ptr=starts_ptr + first, ends_ptr=ends_ptr + first, num_queries=1, lowest=lowest,
                    highest=highest, step=(highest - lowest) // SAMPLE, BLOCK_Q=BLOCK_Q, SEGMENT=SAMPLE, TOPK=TOPK,
                    ROOM=ROOM,
                )  # fmt: skip
            length = tl.cdiv(tl.cdiv(tl.maximum(highest - lowest, 0), SPLITS), BLOCK_K) * BLOCK_K
            lowest += item % SPLITS * length
            highest = tl.where(todo == 0, lowest, tl.minimum(highest, lowest + length))
        elif highest - lowest > ROOM:
            step = (highest - lowest) // SEGMENT
            products(
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
        visible = tl.maximum(tl.minimum(end, highest) - tl.maximum(start, lowest), 0)  # [BLOCK_Q], how many keys
        attempt = 0
        while attempt < 2:
            tl.debug_barrier()
            tl.store(counts_ptr + row, 0)
            tl.debug_barrier()
            for segment in range(lowest, highest, SEGMENT):
                products(
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
            if SPLITS == 1:
                missing = tl.minimum(visible, TOPK) - tl.load(counts_ptr + row)  # [BLOCK_Q]
                attempt += tl.where(tl.max(missing) > 0, 1, 2)  # the sample misled: once more, without a bound
                tl.debug_barrier()
                tl.store(bounds_ptr + row, float("-inf"))
            else:
                attempt = 2  # the merge sees what is missing
        # 4. the best of them
        if SPLITS == 1:
            for query in range(tl.minimum(BLOCK_Q, num_queries - first)):
                size = tl.load(counts_ptr + query)
                finish(
                    values_ptr=values_ptr + query * ROOM, indices_ptr=indices_ptr + query * ROOM, count=size,
                    result_ptr=result_ptr + (first + query).to(tl.int64) * TOPK, TOPK=TOPK, ROOM=ROOM,
                )  # fmt: skip
            item = tl.atomic_add(queue_ptr, 1)
        else:
            item = num_blocks * SPLITS


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
    """Compute `indexcache_kernels.indexer_topk`; `splits` says into how many parts the keys of a query are split."""
    queries, heads, dim = q.shape
    selected = torch.empty((queries, topk), dtype=torch.int32, device=q.device)
    if not queries:
        return selected
    padded_heads = max(4, triton.next_power_of_2(heads))
    room = 2 * max(SEGMENT, triton.next_power_of_2(topk))  # a whole segment fits beside the best
    programs = (
        PROGRAMS[k.itemsize] * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    )
    if splits is None:
        splits = max(1, min(programs // queries, len(k) // (4 * room)))
    block_q = max(1, min(4, COLUMNS[k.itemsize] // padded_heads)) if splits == 1 else 1
    blocks = triton.cdiv(queries, block_q)
    programs = min(programs, blocks) if splits == 1 else queries * splits

    def workspace(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    sets = programs * block_q
    candidates, counts, bounds = workspace(sets, 2, room), workspace(sets), workspace(sets, dtype=torch.float32)
    sample = workspace(queries if splits > 1 else 1, min(SAMPLE, room), dtype=torch.float32)
    # the queue of blocks, or with splits what is to do with each query; never both
    state = torch.full((1 if splits == 1 else queries,), int(splits > 1), dtype=torch.int32, device=q.device)
    inputs = {"q_ptr": q, "k_ptr": k, "weights_ptr": weights, "k_scale_ptr": k if k_scale is None else k_scale}
    inputs |= {"starts_ptr": starts, "ends_ptr": ends}
    shapes = {"HEADS": heads, "PADDED_HEADS": padded_heads, "DIM": dim, "BLOCK_Q": block_q, "BLOCK_K": BLOCK_K}
    shapes |= {"PADDED_DIM": max(32 if k.itemsize == 1 else 16, triton.next_power_of_2(dim)), "ROOM": room}
    shapes |= {"SCALED": k_scale is not None, **arithmetic(q), "num_warps": WARPS, "num_stages": STAGES}
    stream = partial(
        _stream_kernel[(programs,)],
        **inputs, scores_ptr=workspace(programs, block_q, SEGMENT, dtype=torch.float32),
        marks_ptr=workspace(programs, block_q, SEGMENT // 16), candidates_ptr=candidates, counts_ptr=counts,
        bounds_ptr=bounds, sample_ptr=sample, todo_ptr=state, result_ptr=selected,
        queue_ptr=state, num_queries=queries, num_blocks=blocks,
        **shapes, SEGMENT=SEGMENT, STEPS=(SEGMENT // 16).bit_length() - 1, CHUNK=min(CHUNK, SEGMENT), TOPK=topk,
        SAMPLE=sample.shape[1], SPLITS=splits, maxnreg=REGISTERS[k.itemsize],
    )  # fmt: skip
    if splits == 1:
        stream()
        return selected
    parts = min(SAMPLE_PARTS, sample.shape[1] // BLOCK_K)
    sample_kernel[(queries, parts)](**inputs, sample_ptr=sample, **shapes, SAMPLE=sample.shape[1], PARTS=parts)
    merged, merged_counts, merged_bounds = (
        workspace(queries, 2, room),
        workspace(queries),
        workspace(queries, dtype=torch.float32),
    )
    padded_splits = triton.next_power_of_2(splits)
    for _ in range(2):  # the second time those alone whose sample misled, without a bound
        stream()
        merge_kernel[(queries,)](
            candidates_ptr=candidates, counts_ptr=counts, before_ptr=workspace(queries, padded_splits),
            starts_ptr=starts, ends_ptr=ends, merged_ptr=merged, merged_counts_ptr=merged_counts,
            bounds_ptr=merged_bounds, todo_ptr=state, result_ptr=selected, SPLITS=splits, PADDED_SPLITS=padded_splits,
            STEPS=padded_splits.bit_length() - 1, TOPK=topk, ROOM=room, SEGMENT=SEGMENT, num_warps=2 * WARPS,
        )  # fmt: skip
    return selected
