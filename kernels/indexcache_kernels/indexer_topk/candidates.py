"""Candidates of a row for its top-k: found by a bound and a bit each, kept to the best, sorted out at the end.

Most of these functions are not inlined, so their caller must have no shared memory in use (README.md).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_score(score):
    """Map float32 scores to unsigned integers in the same order; both zeros are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _score(ordered):
    """Invert `ordered_score`."""
    bits = ordered.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _nth_largest(ordered, n):
    """Find the n-th largest unsigned integer along the last axis, from its highest bit down; 0 if there are fewer."""
    result = tl.zeros_like(n).to(tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        higher = result | bit
        bit = bit >> 1
        reach = tl.sum((ordered >= tl.expand_dims(higher, -1)).to(tl.int32), -1)
        result = tl.where(reach >= n, higher, result)
    return result


@triton.jit
def _best(values_ptr, count, TOPK: tl.constexpr, ROOM: tl.constexpr):
    """Find the TOPK best of the `count` candidates of a row, of equal ones the first.

    Returns whether each is one of them, its rank among them, and the lowest of them.
    """
    slot = tl.arange(0, ROOM)  # [ROOM]
    slot_mask = slot < count
    ordered = tl.load(values_ptr + slot, mask=slot_mask, other=0).to(tl.uint32, bitcast=True)
    last = _nth_largest(ordered[None, :], tl.full((1,), TOPK, tl.int32))
    above = (slot_mask & (ordered > last)).to(tl.int32)
    equal = (slot_mask & (ordered == last)).to(tl.int32)
    missing = TOPK - tl.sum(above)
    both = tl.cumsum(above + (equal << 16), 0)  # two sums in one
    before = both >> 16
    taken = (above == 1) | ((equal == 1) & (before <= missing))
    return taken, (both & 65535) + tl.minimum(before, missing) - 1, last


@triton.jit(noinline=True)
def shrink(values_ptr, indices_ptr, counts_ptr, bounds_ptr, TOPK: tl.constexpr, ROOM: tl.constexpr):
    """Keep the TOPK best candidates of a row, in their order, and set the score that later ones must exceed."""
    row, slot = tl.arange(0, 1), tl.arange(0, ROOM)  # [1], [ROOM]
    count = tl.load(counts_ptr)
    taken, target, last = _best(values_ptr, count, TOPK, ROOM)
    value = tl.load(values_ptr + slot, mask=taken, other=0)
    tl.debug_barrier()
    tl.store(values_ptr + target, value, mask=taken)
    index = tl.load(indices_ptr + slot, mask=taken, other=0)
    tl.debug_barrier()
    tl.store(indices_ptr + target, index, mask=taken)
    tl.store(bounds_ptr + row, tl.where(count >= TOPK, _score(last), tl.load(bounds_ptr + row)))
    tl.store(counts_ptr + row, tl.minimum(count, TOPK) + tl.zeros_like(row))


@triton.jit(noinline=True)
def finish(values_ptr, indices_ptr, count, result_ptr, TOPK: tl.constexpr, ROOM: tl.constexpr):
    """Write the best TOPK candidates of a row, ascending, -1 behind them."""
    taken, target, _ = _best(values_ptr, count, TOPK, ROOM)
    slot = tl.arange(0, ROOM)  # [ROOM]
    tl.store(result_ptr + target, tl.load(indices_ptr + slot, mask=taken, other=0), mask=taken)
    tl.store(result_ptr + slot, -1, mask=(slot >= count) & (slot < TOPK))


@triton.jit(noinline=True)
def take_sample(
    scores_ptr, bounds_ptr, starts_ptr, ends_ptr, num_queries, lowest, highest, step,
    BLOCK_Q: tl.constexpr, SEGMENT: tl.constexpr, TOPK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Set the bounds of BLOCK_Q rows so that a few more than TOPK of their keys should exceed them.

    Every `step`-th key is the sample; the bound is -inf where all keys may be candidates. Otherwise it is just below a
    score of the sample: scores that equal it are candidates, too.
    """
    row, slot = tl.arange(0, BLOCK_Q), tl.arange(0, SEGMENT)  # [BLOCK_Q], [SEGMENT]
    start = tl.load(starts_ptr + row, mask=row < num_queries, other=2147483647)
    end = tl.minimum(tl.load(ends_ptr + row, mask=row < num_queries, other=0), highest)
    start = tl.maximum(start, lowest)
    key = (lowest + slot * step)[None, :]
    visible = (key >= start[:, None]) & (key < end[:, None])  # [BLOCK_Q, SEGMENT]
    score = tl.load(scores_ptr + row[:, None] * SEGMENT + slot[None, :], mask=visible, other=0.0)
    count, sampled = tl.maximum(end - start, 1), tl.sum(visible.to(tl.int32), 1)
    expected = TOPK / count * sampled  # of the sample are in
    rank = (expected + 4.0 * tl.sqrt(expected) + 4.0).to(tl.int32)  # four standard deviations, and rounding
    bound = _nth_largest(tl.where(visible, ordered_score(score), 0), rank)
    below = bound - tl.where(bound == 2147483648, 2, 1).to(tl.uint32)  # what is below 0 is not -0
    tl.store(bounds_ptr + row, tl.where((count > ROOM) & (rank <= sampled), _score(below), float("-inf")))


@triton.jit
def _ones(word):
    """Count the bits that are set in words of 16."""
    word = word - ((word >> 1) & 0x5555)
    word = (word & 0x3333) + ((word >> 2) & 0x3333)
    word = (word + (word >> 4)) & 0x0F0F
    return (word + (word >> 8)) & 31


@triton.jit(noinline=True)
def take_segment(
    scores_ptr, marks_ptr, values_ptr, indices_ptr, counts_ptr, bounds_ptr, starts_ptr, ends_ptr,
    num_queries, segment, highest,
    BLOCK_Q: tl.constexpr, SEGMENT: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, TOPK: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """Add the keys of a segment that exceed the bounds of BLOCK_Q rows to their candidates.

    Candidates are shrunk first where there is no room. Few keys exceed the bound, so each has a bit that says so, 16 in
    a word, and every candidate then looks for its bit.
    """
    row, slot = tl.arange(0, BLOCK_Q), tl.arange(0, SEGMENT)  # [BLOCK_Q], [SEGMENT]
    start = tl.load(starts_ptr + row, mask=row < num_queries, other=2147483647)
    end = tl.minimum(tl.load(ends_ptr + row, mask=row < num_queries, other=0), highest)
    key = (segment + slot)[None, :]
    visible = (key >= start[:, None]) & (key < end[:, None])  # [BLOCK_Q, SEGMENT]
    score = tl.load(scores_ptr + row[:, None] * SEGMENT + slot[None, :], mask=visible, other=0.0)
    # 1. a bit for each key that passed, and how many stand before each word
    passed = (visible & (score > tl.load(bounds_ptr + row)[:, None])).to(tl.int32) << (slot & 15)[None, :]
    words = tl.sum(tl.reshape(passed, (BLOCK_Q, SEGMENT // 16, 16)), axis=2)  # [BLOCK_Q, SEGMENT // 16]
    ones = _ones(words)
    before = tl.cumsum(ones, 1) - ones
    at_word = row[:, None] * (SEGMENT // 16) + tl.arange(0, SEGMENT // 16)[None, :]
    tl.store(marks_ptr + at_word, words | (before << 16))
    # 2. room for them
    count, added = tl.load(counts_ptr + row), tl.sum(ones, 1)  # [BLOCK_Q]
    if tl.max(count + added) > ROOM:
        for query in range(BLOCK_Q):
            shrink(
                values_ptr + query * ROOM,
                indices_ptr + query * ROOM,
                counts_ptr + query,
                bounds_ptr + query,
                TOPK,
                ROOM,
            )
        tl.debug_barrier()
        count = tl.load(counts_ptr + row)
    tl.debug_barrier()
    # 3. every new candidate looks for its bit: first the word, then the bit in it
    marks_ptrs = marks_ptr + row[:, None] * (SEGMENT // 16)
    for first in range(0, tl.max(added), CHUNK):
        rank = tl.broadcast_to((first + tl.arange(0, CHUNK))[None, :], (BLOCK_Q, CHUNK))
        added_mask = rank < added[:, None]  # [BLOCK_Q, CHUNK]
        word = tl.zeros((BLOCK_Q, CHUNK), tl.int32)  # the last one that has at most `rank` candidates before it
        for step in tl.static_range(STEPS):
            width = SEGMENT // 32 >> step
            word += tl.where(tl.load(marks_ptrs + word + width) >> 16 <= rank, width, 0)
        mark = tl.load(marks_ptrs + word)
        bits, left = mark & 65535, rank - (mark >> 16)  # candidates before it in its word
        bit = tl.zeros((BLOCK_Q, CHUNK), tl.int32)
        for step in tl.static_range(4):
            width = 8 >> step
            low = _ones((bits >> bit) & ((1 << width) - 1))
            bit += tl.where(left >= low, width, 0)
            left -= tl.where(left >= low, low, 0)
        key_in_segment = word * 16 + bit
        value = ordered_score(tl.load(scores_ptr + row[:, None] * SEGMENT + key_in_segment, mask=added_mask, other=0.0))
        target = row[:, None] * ROOM + count[:, None] + rank
        tl.store(values_ptr + target, value.to(tl.int32, bitcast=True), mask=added_mask)
        tl.store(indices_ptr + target, segment + key_in_segment, mask=added_mask)
    tl.debug_barrier()
    tl.store(counts_ptr + row, count + added)
