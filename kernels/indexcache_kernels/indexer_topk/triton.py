"""Scores of a block of queries in a small workspace, and an exact selection from it.

The workspace has a fixed size, so memory is that and the result, however long the context is. See README.md beside this
for the maths, the bytes and what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

WORKSPACE = 256 << 20  # bytes: enough rows at a time to fill a GPU at 128K
SAMPLE = 2048  # scores of a row that say where to look
BLOCK, WARPS = 1024, 4  # of the selection; 2048 scores or 8 warps are a little slower


@triton.jit
def _scores_kernel(
    q,
    k,
    weights,
    k_scale,
    starts,
    ends,
    scores,
    first_row,
    rows,
    low,
    stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Scores of BLOCK_Q queries and BLOCKS_K x BLOCK_K keys; keys are the rows of the product, so heads add up inside
    a thread."""
    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    here = row < rows
    start = tl.load(starts + first_row + row, mask=here, other=2147483647)
    end = tl.load(ends + first_row + row, mask=here, other=0)
    lowest, highest = tl.min(start), tl.max(end)
    first_key = low + tl.program_id(0) * BLOCK_K * BLOCKS_K
    if (first_key < highest) & (first_key + BLOCK_K * BLOCKS_K > lowest):
        part = tl.arange(0, BLOCK_Q * PADDED_HEADS)
        part_row, head = tl.program_id(1) * BLOCK_Q + part // PADDED_HEADS, part % PADDED_HEADS
        there = (part_row < rows) & (head < HEADS)
        place = (first_row + part_row).to(tl.int64) * HEADS + head
        dim = tl.arange(0, PADDED_DIM)
        query = tl.load(q + place[None, :] * DIM + dim[:, None], mask=there[None, :] & (dim < DIM)[:, None], other=0.0)
        weight = tl.load(weights + place, mask=there, other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
        for at in range(first_key, tl.minimum(first_key + BLOCK_K * BLOCKS_K, highest), BLOCK_K):
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
            target = scores + row.to(tl.int64)[None, :] * stride + (key - low)[:, None]
            inside = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
            tl.store(target, score, mask=inside)


@triton.jit
def _ordered(score):
    """Unsigned integers in the order of float32 scores; both zeros are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _nth_largest(values, n):
    """The n-th largest of unsigned integers, 0 where there are fewer; built from its highest bit down."""
    found = tl.zeros((), tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        higher = found | bit
        bit = bit >> 1
        found = tl.where(tl.sum((values >= higher).to(tl.int32)) >= n, higher, found)
    return found


@triton.jit
def _select_kernel(
    scores,
    candidates,
    starts,
    ends,
    found,
    first_row,
    low,
    stride,
    TOPK: tl.constexpr,
    SAMPLE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The TOPK best of one row. A sample says between which two scores the last one that is in will lie; one sweep
    takes what is above and sets aside up to ROOM candidates from between, of which the best are found in registers."""
    row = tl.program_id(0)
    start, end = tl.load(starts + first_row + row), tl.load(ends + first_row + row)
    count = tl.maximum(end - start, 0)
    base = scores + row.to(tl.int64) * stride + (start - low)
    result = found + (first_row + row).to(tl.int64) * TOPK
    lane = tl.arange(0, BLOCK)
    if count <= TOPK:
        for at in range(0, TOPK, BLOCK):
            tl.store(result + at + lane, tl.where(at + lane < count, start + at + lane, -1), mask=at + lane < TOPK)
    else:
        lowest, highest = tl.zeros((), tl.uint32), tl.full((), 4294967295, tl.uint32)
        if count > ROOM:
            sample = _ordered(tl.load(base + tl.arange(0, SAMPLE) * (count // SAMPLE)))
            expected = TOPK / count * SAMPLE  # of the sample are in
            margin = 4.0 * tl.sqrt(expected) + 4.0  # four standard deviations, and rounding
            lowest = _nth_largest(sample, (expected + margin).to(tl.int32))
            if expected - margin >= 1.0:
                highest = _nth_largest(sample, (expected - margin).to(tl.int32))
        values = candidates + row.to(tl.int64) * 2 * ROOM
        indices = values + ROOM
        sure, possible = _sweep(base, values, indices, result, start, count, lowest, highest, TOPK, ROOM, BLOCK)
        if (sure > TOPK) | (sure + possible < TOPK) | ((possible > ROOM) & (lowest < highest)):
            # The sample misled, which random scores do not do in a million rows. Search the whole row.
            lowest = tl.zeros((), tl.uint32)
            bit = tl.full((), 2147483648, tl.uint32)
            for _ in range(32):
                higher = lowest | bit
                bit = bit >> 1
                reach = 0
                for at in range(0, count, BLOCK):
                    exists = at + lane < count
                    ordered = _ordered(tl.load(base + at + lane, mask=exists, other=0.0))
                    reach += tl.sum((exists & (ordered >= higher)).to(tl.int32))
                lowest = tl.where(reach >= TOPK, higher, lowest)
            sure, possible = _sweep(base, values, indices, result, start, count, lowest, lowest, TOPK, ROOM, BLOCK)
        tl.debug_barrier()
        place = tl.arange(0, ROOM)
        exists = place < possible
        ordered = tl.load(values + place, mask=exists, other=0).to(tl.uint32, bitcast=True)
        wanted = TOPK - sure
        last = _nth_largest(tl.where(exists, ordered, 0), wanted)
        above = exists & (ordered > last)
        rank = tl.cumsum((exists & (ordered == last)).to(tl.int32), 0)
        equal = exists & (ordered == last) & (rank <= wanted - tl.sum(above.to(tl.int32)))
        taken = above | equal
        target = result + sure + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(target, tl.load(indices + place, mask=taken, other=0), mask=taken)


@triton.jit
def _sweep(
    base,
    values,
    indices,
    result,
    start,
    count,
    lowest,
    highest,
    TOPK: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the indices of scores above `highest` to the result, set aside those from `lowest` to there; ascending.

    Returns how many there are of both, also where there was no room for them.
    """
    sure, possible = 0, 0
    for at in range(0, count, BLOCK):
        place = at + tl.arange(0, BLOCK)
        exists = place < count
        ordered = _ordered(tl.load(base + place, mask=exists, other=0.0))
        is_sure = exists & (ordered > highest)
        is_possible = exists & (ordered >= lowest) & (ordered <= highest)
        both = is_sure.to(tl.int32) + (is_possible.to(tl.int32) << 16)  # two sums in one
        so_far, total = tl.cumsum(both, 0), tl.sum(both)
        to = sure + (so_far & 65535) - 1
        tl.store(result + to, start + place, mask=is_sure & (to < TOPK))
        to = possible + (so_far >> 16) - 1
        kept = is_possible & (to < ROOM)
        tl.store(values + to, ordered.to(tl.int32, bitcast=True), mask=kept)
        tl.store(indices + to, start + place, mask=kept)
        sure += total & 65535
        possible += total >> 16
    return sure, possible


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
    workspace: int = WORKSPACE,
) -> Tensor:
    """See `indexcache_kernels.indexer_topk`."""
    queries, heads, dim = q.shape
    found = torch.empty((queries, topk), dtype=torch.int32, device=q.device)
    padded_heads = triton.next_power_of_2(heads)
    padded_dim = max(32 if k.itemsize == 1 else 16, triton.next_power_of_2(dim))
    block_q, block_k, blocks_k = max(1, 128 // padded_heads), 64, 16
    room = max(SAMPLE, 2 * triton.next_power_of_2(topk))
    scores = torch.empty(0, dtype=torch.float32, device=q.device)
    candidates = torch.empty(0, dtype=torch.int32, device=q.device)
    for first, rows, low, span in _row_blocks(starts, ends, workspace // 4, 2 * room, block_q):
        if scores.numel() < rows * span:
            scores = torch.empty(rows * span, dtype=torch.float32, device=q.device)
        if candidates.numel() < rows * 2 * room:
            candidates = torch.empty(rows * 2 * room, dtype=torch.int32, device=q.device)
        if span:
            grid = (triton.cdiv(span, block_k * blocks_k), triton.cdiv(rows, block_q))
            _scores_kernel[grid](
                q,
                k,
                weights,
                k if k_scale is None else k_scale,
                starts,
                ends,
                scores,
                first,
                rows,
                low,
                span,
                HEADS=heads,
                PADDED_HEADS=padded_heads,
                DIM=dim,
                PADDED_DIM=padded_dim,
                BLOCK_Q=block_q,
                BLOCK_K=block_k,
                BLOCKS_K=blocks_k,
                SCALED=k_scale is not None,
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                UPCAST=q.dtype == torch.bfloat16 and not q.is_cuda,  # Triton's interpreter multiplies the bits
                num_warps=4,
                num_stages=3 if k.itemsize == 1 else 4,
            )
        _select_kernel[(rows,)](
            scores,
            candidates,
            starts,
            ends,
            found,
            first,
            low,
            span,
            TOPK=topk,
            SAMPLE=SAMPLE,
            ROOM=room,
            BLOCK=min(BLOCK, room),
            num_warps=WARPS,
        )
    return found


def _row_blocks(
    starts: Tensor, ends: Tensor, entries: int, extra: int, step: int
) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of queries whose scores and `extra` entries fit into the workspace: first row, rows, lowest key, keys.

    A block has a multiple of `step` rows, `step` where not even they fit; the last may have fewer.
    """
    all_starts, all_ends = torch.stack([starts, ends]).cpu().numpy()
    most = max(step, entries // extra // step * step)
    first, total = 0, len(all_starts)
    while first < total:
        low = np.minimum.accumulate(all_starts[first : first + most])
        high = np.maximum.accumulate(all_ends[first : first + most])
        rows = np.arange(1, len(low) + 1)
        fit = int(np.searchsorted(rows * (np.maximum(high - low, 0) + extra), entries, side="right"))
        count = min(len(low), max(step, fit // step * step))
        yield first, count, int(low[count - 1]), max(0, int(high[count - 1] - low[count - 1]))
        first += count
