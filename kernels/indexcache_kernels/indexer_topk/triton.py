"""Scores and an exact selection in one pass over the keys: only candidates are kept, never a row of scores.

See README.md beside this for the maths, the bytes and what was measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128  # pairs of query and head of a program
BLOCK_K, WARPS = 128, 8
ROWS = 2  # that are shrunk side by side
PROGRAMS = 2  # a multiprocessor; more than fit at a time wait, and each takes the next block of queries when it is free
REGISTERS = 128  # a thread, so that two programs fit
SEGMENT = 1024  # keys between two looks at what they scored, at least; more with more than 1024 to find


@triton.jit
def _ordered(score):
    """Unsigned integers in the order of float32 scores; both zeros are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _score(ordered):
    """The inverse."""
    bits = ordered.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _best(values, count, ROWS: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr):
    """The TOPK best of the `count` candidates of each row, of equal ones the first.

    Returns where all candidates stand, whether each is one of the best, its place among them, and the lowest of them.
    """
    place = tl.broadcast_to(tl.arange(0, ROOM)[None, :], (ROWS, ROOM))
    slot = tl.arange(0, ROWS)[:, None] * ROOM + place
    exists = place < count[:, None]
    ordered = tl.load(values + slot, mask=exists, other=0).to(tl.uint32, bitcast=True)
    last = tl.zeros((ROWS,), tl.uint32)  # the TOPK-th largest, from its highest bit down; 0 where there are fewer
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        higher = last | bit
        bit = bit >> 1
        last = tl.where(tl.sum((ordered >= higher[:, None]).to(tl.int32), 1) >= TOPK, higher, last)
    above = (exists & (ordered > last[:, None])).to(tl.int32)
    equal = (exists & (ordered == last[:, None])).to(tl.int32)
    wanted = TOPK - tl.sum(above, 1)[:, None]
    both = tl.cumsum(above + (equal << 16), 1)  # two sums in one
    before = both >> 16
    taken = (above == 1) | ((equal == 1) & (before <= wanted))
    return slot, taken, (both & 65535) + tl.minimum(before, wanted) - 1, last


@triton.jit(noinline=True)
def _shrink(values, indices, counts, bounds, ROWS: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr):
    """Keep the TOPK best candidates of each row, in their order, and set the score that later ones must exceed."""
    row = tl.arange(0, ROWS)
    count = tl.load(counts + row)
    slot, taken, place, last = _best(values, count, ROWS, TOPK, ROOM)
    to = row[:, None] * ROOM + place
    value = tl.load(values + slot, mask=taken, other=0)
    tl.debug_barrier()
    tl.store(values + to, value, mask=taken)
    index = tl.load(indices + slot, mask=taken, other=0)
    tl.debug_barrier()
    tl.store(indices + to, index, mask=taken)
    tl.store(bounds + row, _score(last), mask=count >= TOPK)
    tl.store(counts + row, tl.minimum(count, TOPK))


@triton.jit(noinline=True)
def _finish(
    values, indices, counts, result, result_values, stride, rows,
    MERGE: tl.constexpr, ROWS: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write the best TOPK candidates of each row, ascending, -1 behind them; their values where they will be merged."""
    row = tl.arange(0, ROWS)
    count = tl.load(counts + row)
    slot, taken, place, _ = _best(values, count, ROWS, TOPK, ROOM)
    taken = taken & (row < rows)[:, None]
    to = row.to(tl.int64)[:, None] * stride + place
    tl.store(result + to, tl.load(indices + slot, mask=taken, other=0), mask=taken)
    lane = tl.arange(0, ROOM)[None, :]
    left = (lane >= count[:, None]) & (lane < TOPK) & (row < rows)[:, None]
    tl.store(result + row.to(tl.int64)[:, None] * stride + lane, -1, mask=left)
    if MERGE:
        tl.store(result_values + to, tl.load(values + slot, mask=taken, other=0), mask=taken)


@triton.jit(noinline=True)
def _take_segment(
    scores, values, indices, counts, bounds, starts, ends, rows, segment, highest,
    BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Add the keys of a segment that exceed the bounds of BLOCK_Q rows to their candidates, after shrinking them where
    there is no room; not inlined, to leave registers to the products.

    Which keys those are is a bit each, 16 in a word: only words are counted and placed.
    """
    row, word, lane = tl.arange(0, BLOCK_Q), tl.arange(0, SEGMENT // 16), tl.arange(0, SEGMENT)
    start = tl.load(starts + row, mask=row < rows, other=2147483647)
    end = tl.minimum(tl.load(ends + row, mask=row < rows, other=0), highest)
    key = (segment + lane)[None, :]
    seen = (key >= start[:, None]) & (key < end[:, None])
    score = tl.load(scores + row[:, None] * SEGMENT + lane[None, :], mask=seen, other=float("-inf"))
    passed = (seen & (score > tl.load(bounds + row)[:, None])).to(tl.int32) << (lane & 15)[None, :]
    bits = tl.sum(tl.reshape(passed, (BLOCK_Q, SEGMENT // 16, 16)), axis=2)
    ones = bits - ((bits >> 1) & 0x5555)
    ones = (ones & 0x3333) + ((ones >> 2) & 0x3333)
    ones = (ones + (ones >> 4)) & 0x0F0F
    ones = (ones + (ones >> 8)) & 31
    count, added = tl.load(counts + row), tl.sum(ones, 1)
    if tl.max(count + added) > ROOM:
        for at in range(0, BLOCK_Q, ROWS):
            _shrink(values + at * ROOM, indices + at * ROOM, counts + at, bounds + at, ROWS, TOPK, ROOM)
        tl.debug_barrier()
        count = tl.load(counts + row)
    to = row[:, None] * ROOM + count[:, None] + tl.cumsum(ones, 1) - ones
    for bit in tl.static_range(16):
        there = ((bits >> bit) & 1) == 1
        key = word[None, :] * 16 + bit
        score = tl.load(scores + row[:, None] * SEGMENT + key, mask=there, other=0.0)
        tl.store(values + to, _ordered(score).to(tl.int32, bitcast=True), mask=there)
        tl.store(indices + to, tl.broadcast_to(segment + key, (BLOCK_Q, SEGMENT // 16)), mask=there)
        to += there.to(tl.int32)
    tl.store(counts + row, count + added)


@triton.jit
def _stream_kernel(
    q, k, weights, k_scale, starts, ends, scores, candidates, counts, bounds, found, found_values, queue,
    rows, blocks,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr, TOPK: tl.constexpr,
    ROOM: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Takes BLOCK_Q queries and one of SPLITS parts of their keys at a time from the queue, the last queries first.

    Keys are the rows of the product, so heads add up inside a thread. Scores of a segment go to memory of the
    program's own, which stays in the cache.
    """
    program, row = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_Q)
    scores += program * BLOCK_Q * SEGMENT
    counts += program * BLOCK_Q
    bounds += program * BLOCK_Q
    values = candidates + program * BLOCK_Q * ROOM * 2
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
        tl.debug_barrier()
        tl.store(counts + row, 0)
        tl.store(bounds + row, float("-inf"))
        tl.debug_barrier()
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
                scores, values, indices, counts, bounds, starts + first, ends + first, rows - first, segment, highest,
                BLOCK_Q, ROWS, SEGMENT, TOPK, ROOM,
            )  # fmt: skip
            tl.debug_barrier()
        for at in range(0, BLOCK_Q, ROWS):
            target = ((first + at).to(tl.int64) * SPLITS + split) * TOPK
            _finish(
                values + at * ROOM, indices + at * ROOM, counts + at, found + target, found_values + target,
                SPLITS * TOPK, rows - first - at, SPLITS > 1, ROWS, TOPK, ROOM,
            )  # fmt: skip
        item = tl.atomic_add(queue, 1)


@triton.jit
def _merge_kernel(
    parts, part_values, candidates, counts, bounds, found, TOTAL: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """The best of what the parts of one query's keys have."""
    token = tl.program_id(0).to(tl.int64)
    values = candidates + token * ROOM * 2
    indices = values + ROOM
    counts += token
    row = tl.arange(0, 1)
    tl.store(counts + row, 0)
    for at in range(0, TOTAL, SEGMENT):
        place = (at + tl.arange(0, SEGMENT))[None, :]
        index = tl.load(parts + token * TOTAL + place, mask=place < TOTAL, other=-1)
        there = (index >= 0).to(tl.int32)
        value = tl.load(part_values + token * TOTAL + place, mask=index >= 0, other=0)
        tl.debug_barrier()
        count, added = tl.load(counts + row), tl.sum(there, 1)
        if tl.max(count + added) > ROOM:
            _shrink(values, indices, counts, bounds + token, 1, TOPK, ROOM)
            tl.debug_barrier()
            count = tl.load(counts + row)
        to = count[:, None] + tl.cumsum(there, 1) - 1
        tl.store(values + to, value, mask=index >= 0)
        tl.store(indices + to, index, mask=index >= 0)
        tl.store(counts + row, count + added)
    tl.debug_barrier()
    result = found + token * TOPK
    _finish(values, indices, counts, result, result, TOPK, 1, False, 1, TOPK, ROOM)


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
    segment = max(SEGMENT, triton.next_power_of_2(topk))
    room = 2 * segment  # a whole segment fits beside the best
    programs = PROGRAMS * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    if splits is None:
        splits = max(1, min(programs // blocks, len(k) // (4 * room)))
    programs = min(programs, blocks * splits)
    sets = max(programs * block_q, queries if splits > 1 else 0)  # the merge has one of its own for each query

    def workspace(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    parts, part_values = workspace(2, queries, splits, topk) if splits > 1 else (found, found)
    candidates, counts, bounds = workspace(sets, 2, room), workspace(sets), workspace(sets, dtype=torch.float32)
    _stream_kernel[(programs,)](
        q,
        k,
        weights,
        k if k_scale is None else k_scale,
        starts,
        ends,
        workspace(programs, block_q, segment, dtype=torch.float32),
        candidates,
        counts,
        bounds,
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
        BLOCK_K=min(BLOCK_K, segment),
        ROWS=min(ROWS, block_q),
        SEGMENT=segment,
        TOPK=topk,
        ROOM=room,
        SPLITS=splits,
        SCALED=k_scale is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        UPCAST=q.dtype == torch.bfloat16 and not q.is_cuda,  # Triton's interpreter multiplies the bits
        num_warps=WARPS,
        num_stages=3 if k.itemsize == 1 else 2,
        maxnreg=REGISTERS,
    )
    if splits > 1:
        total = splits * topk
        _merge_kernel[(queries,)](
            parts, part_values, candidates, counts, bounds, found, TOTAL=total, TOPK=topk, ROOM=room, SEGMENT=segment
        )
    return found
