"""Scores and an exact selection in one pass over the keys: only candidates are kept, never a row of scores.

See README.md beside this for the maths, the bytes and what was measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128  # pairs of query and head of a program
PROGRAMS = 4  # a multiprocessor; more than fit at a time wait, and each takes the next block of queries when it is free
SEGMENT = 1024  # keys between two looks at what they scored
REGISTERS = 128  # a thread: four programs a multiprocessor


@triton.jit
def _ordered(score):
    """Unsigned integers in the order of float32 scores; both zeros are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _best(values, count, TOPK: tl.constexpr, ROOM: tl.constexpr):
    """The TOPK best of `count` candidates, of equal ones the first.

    Returns whether each is one of them, its place among them, and the lowest value taken.
    """
    place = tl.arange(0, ROOM)
    ordered = tl.load(values + place, mask=place < count, other=0).to(tl.uint32, bitcast=True)
    last = tl.zeros((), tl.uint32)  # the TOPK-th largest, from its highest bit down; 0 where there are fewer
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        higher = last | bit
        bit = bit >> 1
        last = tl.where(tl.sum((ordered >= higher).to(tl.int32)) >= TOPK, higher, last)
    above = ((place < count) & (ordered > last)).to(tl.int32)
    equal = ((place < count) & (ordered == last)).to(tl.int32)
    wanted = TOPK - tl.sum(above)
    both = tl.cumsum(above + (equal << 16), 0)
    before = both >> 16
    taken = (above == 1) | ((equal == 1) & (before <= wanted))
    return taken, (both & 65535) + tl.minimum(before, wanted) - 1, last


@triton.jit(noinline=True)
def _shrink(values, indices, count, TOPK: tl.constexpr, ROOM: tl.constexpr):
    """Keep the TOPK best candidates and their order; return the lowest value of them."""
    taken, to, last = _best(values, count, TOPK, ROOM)
    place = tl.arange(0, ROOM)
    value = tl.load(values + place, mask=taken, other=0)
    tl.debug_barrier()
    tl.store(values + to, value, mask=taken)
    index = tl.load(indices + place, mask=taken, other=0)
    tl.debug_barrier()
    tl.store(indices + to, index, mask=taken)
    return last


@triton.jit
def _take(
    ordered,
    index,
    exists,
    values,
    indices,
    count,
    bound,
    BLOCK_Q: tl.constexpr,
    TOPK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Add `[BLOCK_Q, n]` scores above the bounds of their rows to the candidates; where there is no room, keep the
    best TOPK first. `n` is at most ROOM - TOPK.

    Returns how many candidates each row has, and its bound: of later scores only higher ones can be in.
    """
    row = tl.arange(0, BLOCK_Q)
    reach = tl.sum((exists & (ordered > bound[:, None])).to(tl.int32), 1)
    if tl.max(count + reach) > ROOM:
        tl.debug_barrier()
        for at in range(BLOCK_Q):
            size = tl.sum(tl.where(row == at, count, 0))
            if size > TOPK:
                last = _shrink(values + at * ROOM, indices + at * ROOM, size, TOPK, ROOM)
                count = tl.where(row == at, TOPK, count)
                bound = tl.where(row == at, last, bound)
        tl.debug_barrier()
    chosen = exists & (ordered > bound[:, None])
    flags = chosen.to(tl.int32)
    place = row[:, None] * ROOM + count[:, None] + tl.cumsum(flags, 1) - 1
    tl.store(values + place, ordered.to(tl.int32, bitcast=True), mask=chosen)
    tl.store(indices + place, index, mask=chosen)
    return count + tl.sum(flags, 1), bound


@triton.jit(noinline=True)
def _take_segment(
    scores, values, indices, state, starts, ends, first, rows, segment, highest,
    BLOCK_Q: tl.constexpr, SEGMENT: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Take what BLOCK_Q queries scored on a segment; not inlined, to leave registers to the products."""
    row = tl.arange(0, BLOCK_Q)
    start = tl.load(starts + first + row, mask=first + row < rows, other=2147483647)[:, None]
    end = tl.load(ends + first + row, mask=first + row < rows, other=0)[:, None]
    index = tl.broadcast_to((segment + tl.arange(0, SEGMENT))[None, :], (BLOCK_Q, SEGMENT))
    exists = (index >= start) & (index < tl.minimum(end, highest))
    score = tl.load(scores + row[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :], mask=exists, other=0.0)
    count = tl.load(state + row)
    bound = tl.load(state + BLOCK_Q + row).to(tl.uint32, bitcast=True)
    count, bound = _take(_ordered(score), index, exists, values, indices, count, bound, BLOCK_Q, TOPK, ROOM)
    tl.store(state + row, count)
    tl.store(state + BLOCK_Q + row, bound.to(tl.int32, bitcast=True))


@triton.jit(noinline=True)
def _finish(values, indices, count, result, result_values, MERGE: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr):
    """Write the best TOPK candidates, ascending, -1 behind them; with their values where they will be merged."""
    taken, place, _ = _best(values, count, TOPK, ROOM)
    lane = tl.arange(0, ROOM)
    tl.store(result + place, tl.load(indices + lane, mask=taken, other=0), mask=taken)
    tl.store(result + lane, -1, mask=(lane >= count) & (lane < TOPK))
    if MERGE:
        tl.store(result_values + place, tl.load(values + lane, mask=taken, other=0), mask=taken)


@triton.jit
def _stream_kernel(
    q, k, weights, k_scale, starts, ends, scores, candidates, states, found, found_values, queue, rows, blocks,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENT: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr,
    SPLITS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Takes BLOCK_Q queries and one of SPLITS parts of their keys at a time from the queue, the last queries first.

    Keys are the rows of the product, so heads add up inside a thread. Scores of a segment go to memory of the
    program's own, which stays in the cache.
    """
    row = tl.arange(0, BLOCK_Q)
    scores += tl.program_id(0) * BLOCK_Q * SEGMENT
    state = states + tl.program_id(0) * BLOCK_Q * 2  # of each row: how many candidates, and the bound they must pass
    values = candidates + tl.program_id(0).to(tl.int64) * BLOCK_Q * ROOM * 2
    indices = values + BLOCK_Q * ROOM
    part = tl.arange(0, BLOCK_Q * PADDED_HEADS)
    part_row, head = part // PADDED_HEADS, part % PADDED_HEADS
    dim = tl.arange(0, PADDED_DIM)
    item = tl.atomic_add(queue, 1)
    while item < blocks * SPLITS:
        first, split = (blocks - 1 - item // SPLITS) * BLOCK_Q, item % SPLITS
        here = first + row < rows
        lowest = tl.min(tl.load(starts + first + row, mask=here, other=2147483647))
        highest = tl.max(tl.load(ends + first + row, mask=here, other=0))
        if SPLITS > 1:
            length = tl.cdiv(tl.cdiv(tl.maximum(highest - lowest, 0), SPLITS), BLOCK_K) * BLOCK_K
            lowest += split * length
            highest = tl.minimum(highest, lowest + length)
        there = (first + part_row < rows) & (head < HEADS)
        place = (first + part_row).to(tl.int64) * HEADS + head
        query = tl.load(q + place[None, :] * DIM + dim[:, None], mask=there[None, :] & (dim < DIM)[:, None], other=0.0)
        weight = tl.load(weights + place, mask=there, other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
        tl.store(state + tl.arange(0, BLOCK_Q * 2), 0)
        for segment in range(lowest, highest, SEGMENT):
            for at in range(segment, tl.minimum(segment + SEGMENT, highest), BLOCK_K):
                key = at + tl.arange(0, BLOCK_K)
                exists = key < highest
                vectors = tl.load(
                    k + key.to(tl.int64)[:, None] * DIM + dim[None, :],
                    mask=exists[:, None] & (dim < DIM)[None, :],
                    other=0.0,
                )
                if UPCAST:
                    vectors = vectors.to(tl.float32)
                product = tl.dot(vectors, query, input_precision=PRECISION)
                product = tl.maximum(product, 0.0) * weight[None, :]
                score = tl.sum(tl.reshape(product, (BLOCK_K, BLOCK_Q, PADDED_HEADS)), axis=2)
                if SCALED:
                    score *= tl.load(k_scale + key, mask=exists, other=0.0)[:, None]
                tl.store(scores + row[None, :] * SEGMENT + (key - segment)[:, None], score)
            tl.debug_barrier()
            _take_segment(
                scores, values, indices, state, starts, ends, first, rows, segment, highest,
                BLOCK_Q, SEGMENT, TOPK, ROOM,
            )  # fmt: skip
            tl.debug_barrier()
        tl.debug_barrier()
        for at in range(tl.minimum(BLOCK_Q, rows - first)):
            target = ((first + at).to(tl.int64) * SPLITS + split) * TOPK
            its_values, its_indices, size = values + at * ROOM, indices + at * ROOM, tl.load(state + at)
            _finish(its_values, its_indices, size, found + target, found_values + target, SPLITS > 1, TOPK, ROOM)
        tl.debug_barrier()
        item = tl.atomic_add(queue, 1)


@triton.jit
def _merge_kernel(
    parts, part_values, candidates, found, TOTAL: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """The best of what the parts of one query's keys have."""
    token = tl.program_id(0).to(tl.int64)
    values = candidates + token * ROOM * 2
    indices = values + ROOM
    count, bound = tl.zeros((1,), tl.int32), tl.zeros((1,), tl.uint32)
    for at in range(0, TOTAL, SEGMENT):
        place = (at + tl.arange(0, SEGMENT))[None, :]
        index = tl.load(parts + token * TOTAL + place, mask=place < TOTAL, other=-1)
        ordered = tl.load(part_values + token * TOTAL + place, mask=index >= 0, other=0).to(tl.uint32, bitcast=True)
        count, bound = _take(ordered, index, index >= 0, values, indices, count, bound, 1, TOPK, ROOM)
    tl.debug_barrier()
    result = found + token * TOPK
    _finish(values, indices, tl.sum(count), result, result, False, TOPK, ROOM)


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `indexcache_kernels.indexer_topk`; `splits` says into how many parts the keys of a query are split."""
    queries, heads, dim = q.shape
    found = torch.empty((queries, topk), dtype=torch.int32, device=q.device)
    if not queries:
        return found
    padded_heads = max(4, triton.next_power_of_2(heads))
    block_q = max(1, min(4, COLUMNS // padded_heads))
    blocks = triton.cdiv(queries, block_q)
    room = 2 * max(SEGMENT, triton.next_power_of_2(topk))
    programs = PROGRAMS * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    if splits is None:
        splits = max(1, min(programs // blocks, len(k) // (4 * room)))
    programs = min(programs, blocks * splits)
    parts = part_values = found
    if splits > 1:
        parts, part_values = torch.empty((2, queries, splits, topk), dtype=torch.int32, device=q.device)
    scores = torch.empty((programs, block_q, SEGMENT), dtype=torch.float32, device=q.device)
    sets = max(programs * block_q, queries if splits > 1 else 0)  # the merge has one of its own for each query
    candidates = torch.empty((sets, 2, room), dtype=torch.int32, device=q.device)
    states = torch.empty((programs, 2, block_q), dtype=torch.int32, device=q.device)
    _stream_kernel[(programs,)](
        q,
        k,
        weights,
        k if k_scale is None else k_scale,
        starts,
        ends,
        scores,
        candidates,
        states,
        parts,
        part_values,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        queries,
        blocks,
        HEADS=heads,
        PADDED_HEADS=padded_heads,
        DIM=dim,
        PADDED_DIM=max(32 if k.itemsize == 1 else 16, triton.next_power_of_2(dim)),
        BLOCK_Q=block_q,
        BLOCK_K=64,
        SEGMENT=SEGMENT,
        TOPK=topk,
        ROOM=room,
        SPLITS=splits,
        SCALED=k_scale is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        UPCAST=q.dtype == torch.bfloat16 and not q.is_cuda,  # Triton's interpreter multiplies the bits
        num_warps=4,
        num_stages=3,
        maxnreg=REGISTERS,
    )
    if splits > 1:
        total = splits * topk
        _merge_kernel[(queries,)](
            parts, part_values, candidates, found, TOTAL=total, TOPK=topk, ROOM=room, SEGMENT=SEGMENT, num_warps=4
        )
    return found
