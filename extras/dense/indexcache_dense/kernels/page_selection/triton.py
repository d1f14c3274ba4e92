"""Page scores with one read of the keys; selection by a threshold on the scores' bits. Shapes are static."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_dense.kernels.page_selection.memory import StepMemory
from indexcache_dense.kernels.pages import CachedPages, PageBudget

_CHUNK = 512  # dimensions of key heads that go into one product


@triton.jit
def skipped(pages, requests_ptr, steps_ptr, row, BUDGET: tl.constexpr, EVERY: tl.constexpr):
    """Return whether a step needs no scores of a request: it takes all of its pages, or those that it holds."""
    found = pages <= BUDGET  # all of them are taken
    if EVERY > 0:
        found = found | (tl.load(steps_ptr + tl.load(requests_ptr + row)) % EVERY != 0)
    return found


@triton.jit
def _queries(
    q_ptr, lse_ptr, row, chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the heads of `WIDTH` key heads, `[BLOCK_H, BLOCK_D]`, zero outside their own dimensions; denominators."""
    group = HEADS // KV_HEADS
    head, column = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    first = chunk * WIDTH * group
    live = (head < WIDTH * group) & (first + head < HEADS)
    own = (head[:, None] // group == column[None, :] // DIM) & live[:, None]
    offset = (row * HEADS + first + head)[:, None] * DIM + (column % DIM)[None, :]
    q = tl.load(q_ptr + offset, mask=own, other=0.0)
    return q, tl.load(lse_ptr + row * HEADS + first + head, mask=live, other=float("inf"))  # others get no share


@triton.jit
def _largest_share(
    q, base, k_ptr, slot, live, chunk, scale, k_slot_stride, k_head_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Find the largest share that one of the heads gives each token, `[BLOCK_L]`. One product serves them all."""
    column = tl.arange(0, BLOCK_D)
    kv_head = chunk * WIDTH + column // DIM
    known = (column < WIDTH * DIM) & (kv_head < KV_HEADS)
    offset = slot[None, :] * k_slot_stride + (kv_head * k_head_stride + column % DIM)[:, None]
    k = tl.load(k_ptr + offset, mask=known[:, None] & live[None, :], other=0.0)  # [BLOCK_D, BLOCK_L]
    logit = tl.dot(q, k, input_precision=PRECISION) * scale
    return tl.max(tl.exp(logit - base[:, None]), axis=0)


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, table_ptr, starts_ptr, lengths_ptr, lse_ptr, out_ptr, requests_ptr, steps_ptr, scale,
    k_slot_stride, k_head_stride, table_stride, out_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    PAGE: tl.constexpr, TABLE_PAGE: tl.constexpr, BUDGET: tl.constexpr, SPLITS: tl.constexpr, LISTED: tl.constexpr,
    EVERY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Score a part of one request's pages; key heads are taken in chunks, the queries of two of which are kept."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    pages = tl.cdiv(length, PAGE)
    if skipped(pages, requests_ptr, steps_ptr, row, BUDGET, EVERY):
        return
    first = tl.load(starts_ptr + row) if LISTED else row * table_stride  # of the request's entries
    unit: tl.constexpr = BLOCK_L if BLOCK_L > PAGE else PAGE
    part = tl.cdiv(tl.cdiv(pages, SPLITS) * PAGE, unit) * unit  # tokens: whole pages, whole blocks
    q, base = _queries(
        q_ptr=q_ptr, lse_ptr=lse_ptr, row=row, chunk=0, HEADS=HEADS, KV_HEADS=KV_HEADS, DIM=DIM, WIDTH=WIDTH,
        BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    if CHUNKS == 2:
        second_q, second_base = _queries(
            q_ptr=q_ptr, lse_ptr=lse_ptr, row=row, chunk=1, HEADS=HEADS, KV_HEADS=KV_HEADS, DIM=DIM, WIDTH=WIDTH,
            BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D,
        )  # fmt: skip
    total = 0.0  # of a page that is larger than a block
    for start in range(split * part, tl.minimum(split * part + part, pages * PAGE), BLOCK_L):
        token = start + tl.arange(0, BLOCK_L)  # [BLOCK_L]
        live = token < length
        entry = tl.load(table_ptr + first + token // TABLE_PAGE, mask=live, other=0).to(tl.int64)
        slot = entry * TABLE_PAGE + token % TABLE_PAGE
        largest = _largest_share(
            q=q, base=base, k_ptr=k_ptr, slot=slot, live=live, chunk=0, scale=scale, k_slot_stride=k_slot_stride,
            k_head_stride=k_head_stride, KV_HEADS=KV_HEADS, DIM=DIM, WIDTH=WIDTH, BLOCK_D=BLOCK_D,
            PRECISION=PRECISION,
        )  # fmt: skip
        if CHUNKS == 2:
            other = _largest_share(
                q=second_q, base=second_base, k_ptr=k_ptr, slot=slot, live=live, chunk=1, scale=scale,
                k_slot_stride=k_slot_stride, k_head_stride=k_head_stride, KV_HEADS=KV_HEADS, DIM=DIM, WIDTH=WIDTH,
                BLOCK_D=BLOCK_D, PRECISION=PRECISION,
            )  # fmt: skip
            largest = tl.maximum(largest, other)
        elif CHUNKS > 2:
            for chunk in range(1, CHUNKS):
                more_q, more_base = _queries(
                    q_ptr=q_ptr, lse_ptr=lse_ptr, row=row, chunk=chunk, HEADS=HEADS, KV_HEADS=KV_HEADS, DIM=DIM,
                    WIDTH=WIDTH, BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D,
                )  # fmt: skip
                other = _largest_share(
                    q=more_q, base=more_base, k_ptr=k_ptr, slot=slot, live=live, chunk=chunk, scale=scale,
                    k_slot_stride=k_slot_stride, k_head_stride=k_head_stride, KV_HEADS=KV_HEADS, DIM=DIM, WIDTH=WIDTH,
                    BLOCK_D=BLOCK_D, PRECISION=PRECISION,
                )  # fmt: skip
                largest = tl.maximum(largest, other)
        shares = tl.where(live, largest, 0.0)
        if BLOCK_L < PAGE:
            total = tl.where(start % PAGE == 0, 0.0, total) + tl.sum(shares, axis=0)
            tl.store(out_ptr + row * out_stride + start // PAGE, total)
        else:
            page = start // PAGE + tl.arange(0, BLOCK_L // PAGE)
            by_page = tl.sum(tl.reshape(shares, [BLOCK_L // PAGE, PAGE]), axis=1)
            tl.store(out_ptr + row * out_stride + page, by_page, mask=page < pages)


@triton.jit
def _select_kernel(
    scores_ptr, table_ptr, starts_ptr, lengths_ptr, out_table_ptr, out_starts_ptr, out_lengths_ptr, requests_ptr,
    steps_ptr, memory_ptr, scores_stride, table_stride, out_stride, memory_stride, memory_pages, beta,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ENTRIES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    BUDGET: tl.constexpr, RECENT: tl.constexpr, SINKS: tl.constexpr, LISTED: tl.constexpr, OUT_LISTED: tl.constexpr,
    REMEMBERS: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Write the page table of one request.

    With REMEMBERS by `memory_pages` scores of its memory: with EVERY of held pages, else averages.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    pages = tl.cdiv(length, PAGE)
    page = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    newest = tl.where(pages > BUDGET, pages - RECENT, 0)  # from here on all are taken
    open_ = (page >= SINKS) & (page < newest)  # for the scores to decide
    needed = BUDGET - RECENT - SINKS
    scores = tl.load(scores_ptr + row * scores_stride + page, mask=page < pages, other=0.0)
    live, kept = page < tl.where(pages > BUDGET, pages, 0), page < tl.where(pages > BUDGET, memory_pages, 0)
    step, own = 0, memory_ptr
    if REMEMBERS:
        request = tl.load(requests_ptr + row)
        step = tl.load(steps_ptr + request)
        own = memory_ptr + request * memory_stride
        before = tl.load(own + page, mask=live, other=0).to(tl.float32)
        if EVERY > 0:
            scores = tl.where(step % EVERY == 0, scores, before)  # held are as many as are to be taken
        else:
            scores = tl.where(step > 0, beta * before + (1 - beta) * scores, scores)
            tl.store(own + page, tl.where(live, scores, 0.0), mask=kept)
    # scores are at least 0, so their bits are ordered as they are; pages that are not open rank below all, and NaN
    # counts as infinity, so that never more pages are taken than there is room for
    bits = tl.where(open_, tl.minimum(tl.maximum(scores.to(tl.int32, bitcast=True), 0), 0x7F800000), -1)
    # the highest threshold that leaves enough at or above it, two bits at a time: one sum counts for all three
    low, one = tl.full((), 0, tl.int32), tl.full((), 0x20000000, tl.int32)
    count = tl.where(pages > BUDGET, -1, needed)
    while (one > 0) & (count != needed):  # as many as are needed: further bits would tell no more
        found = (bits >= low + one).to(tl.int64) + ((bits >= low + 2 * one).to(tl.int64) << 20)
        counts = tl.sum(found + ((bits >= low + 3 * one).to(tl.int64) << 40))
        enough = ((counts & 0xFFFFF) >= needed).to(tl.int32) + (((counts >> 20) & 0xFFFFF) >= needed).to(tl.int32)
        enough += ((counts >> 40) >= needed).to(tl.int32)
        low += one * enough
        counts = counts >> 20 * tl.maximum(enough - 1, 0)  # that of the highest such threshold comes first
        count = tl.where(enough > 0, (counts & 0xFFFFF).to(tl.int32), count)
        one = tl.where(one == 2, 1, one // 4)  # of 31 bits the last comes alone
    above, lower = bits > low, bits == low
    if count != needed:
        room = needed - tl.sum(above.to(tl.int32))
        lower = lower & (tl.cumsum(lower.to(tl.int32), axis=0) <= room)  # of equal scores the lower pages
    if EVERY > 0:
        tl.store(own + page, open_ & (above | lower), mask=kept)
    if REMEMBERS:
        tl.store(steps_ptr + request, step + 1, mask=pages > BUDGET)
    taken = (page < pages) & (above | lower | (page < SINKS) | (page >= newest))
    rank = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    table_ptr += tl.load(starts_ptr + row) if LISTED else row * table_stride
    out_table_ptr += tl.load(out_starts_ptr + row) if OUT_LISTED else row * out_stride
    # Few threads have a page that is taken, so pages are listed where their entries go, for all threads to look up.
    tl.store(out_table_ptr + rank, page, mask=taken)
    tl.debug_barrier()
    for number in range(TILES):
        place = (TILES - 1 - number) * TILE + tl.arange(0, TILE)  # last ones first: an entry lies behind its page
        held = place < tl.minimum(pages, BUDGET) * ENTRIES
        source = tl.load(out_table_ptr + place // ENTRIES, mask=held, other=0) * ENTRIES + place % ENTRIES
        held = held & (source * (PAGE // ENTRIES) < length)
        entry = tl.load(table_ptr + source, mask=held, other=0)
        tl.debug_barrier()
        tl.store(out_table_ptr + place, entry, mask=held)
    tl.store(out_lengths_ptr + row, tl.minimum(pages, BUDGET) * PAGE - (pages * PAGE - length))


def page_scores(
    q: Tensor,
    k: Tensor,
    pages: CachedPages,
    *,
    lse: Tensor,
    scale: float,
    budget: PageBudget,
    out: Tensor,
    splits: int,
    memory: StepMemory | None,
) -> None:
    """Compute `naive.page_scores`; `k` may have strides of its own, but for its last axis."""
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    width = min(kv_heads, max(1, _CHUNK // dim))
    chunks, block_d = triton.cdiv(kv_heads, width), max(16, triton.next_power_of_2(width * dim))
    block_h = max(16, triton.next_power_of_2(width * (heads // kv_heads)))
    key_bytes = min(chunks, 2) * block_d * q.element_size()  # of a token, that are read at once
    # The keys of a block, and how far they are read ahead: all of it and the queries fit on chip.
    block_l, stages = max(16, min(128, (64 << 10) // key_bytes)), 3 if q.element_size() < 4 else 1
    _scores_kernel[(len(q), splits)](
        q_ptr=q, k_ptr=k, lse_ptr=lse, out_ptr=out, scale=scale, k_slot_stride=k.stride(0), k_head_stride=k.stride(1),
        out_stride=out.stride(0), HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=width, CHUNKS=chunks, BLOCK_H=block_h,
        BLOCK_D=block_d, BLOCK_L=block_l, TABLE_PAGE=pages.table_page, SPLITS=splits, PRECISION="ieee",
        **table_of(pages), **due_steps(pages, budget, memory), num_warps=4, num_stages=stages,
    )  # fmt: skip


def select_pages(
    scores: Tensor,
    pages: CachedPages,
    budget: PageBudget,
    out_table: Tensor,
    out_starts: Tensor | None,
    out_lengths: Tensor,
    memory: StepMemory | None,
) -> None:
    """Compute `naive.select_pages`."""
    rows = scores if memory is None else memory.rows
    block_n = triton.next_power_of_2(max(scores.shape[1], rows.shape[1]))
    entries = budget.page_tokens // pages.table_page
    tile = min(4096, triton.next_power_of_2(budget.pages * entries))
    if rows.dtype == torch.bool:
        rows = rows.view(torch.int8)
    _select_kernel[(len(scores),)](
        scores_ptr=scores, out_table_ptr=out_table, out_starts_ptr=pages.lengths if out_starts is None else out_starts,
        out_lengths_ptr=out_lengths, memory_ptr=rows, scores_stride=scores.stride(0), out_stride=out_table.stride(0),
        memory_stride=rows.stride(0), memory_pages=rows.shape[1], beta=0.0 if memory is None else memory.beta,
        BLOCK_N=block_n, ENTRIES=entries, TILE=tile, TILES=triton.cdiv(budget.pages * entries, tile),
        RECENT=budget.recent_pages, SINKS=budget.sink_pages,
        OUT_LISTED=out_starts is not None, REMEMBERS=memory is not None,
        **table_of(pages), **due_steps(pages, budget, memory), num_warps=4 if block_n <= 8192 else 32,
    )  # fmt: skip


def table_of(pages: CachedPages) -> dict[str, Any]:
    """Return what kernels take to find the entries of a request."""
    return {
        "table_ptr": pages.table,
        "starts_ptr": pages.lengths if pages.starts is None else pages.starts,
        "table_stride": pages.table.stride(0),
        "LISTED": pages.starts is not None,
    }


def due_steps(pages: CachedPages, budget: PageBudget, memory: StepMemory | None) -> dict[str, Any]:
    """Return what kernels take to know which requests' pages are scored in a step, see `skipped`."""
    return {
        "lengths_ptr": pages.lengths,
        "PAGE": budget.page_tokens,
        "BUDGET": budget.pages,
        "requests_ptr": pages.lengths if memory is None else memory.requests,
        "steps_ptr": pages.lengths if memory is None else memory.steps,
        "EVERY": 0 if memory is None else memory.every,
    }
