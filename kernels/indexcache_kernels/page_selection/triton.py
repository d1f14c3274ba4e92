"""Page scores with one read of the keys; selection by a threshold on the scores' bits. Shapes are static."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from indexcache_kernels.page_selection import PageBudget


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, table_ptr, starts_ptr, lengths_ptr, lse_ptr, out_ptr, scale,
    k_slot_stride, k_head_stride, table_stride, out_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, TABLE_PAGE: tl.constexpr, BUDGET: tl.constexpr, BLOCK_L: tl.constexpr, SPLITS: tl.constexpr,
    LISTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a part of one request's pages.

    One product serves all heads: a query has its own key head's dimensions and zeros in those of the others.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    pages = tl.cdiv(length, PAGE)
    if pages <= BUDGET:  # all of them are taken
        return
    first = tl.load(starts_ptr + row) if LISTED else row * table_stride  # of the request's entries
    part = tl.cdiv(tl.cdiv(pages, SPLITS) * PAGE, BLOCK_L) * BLOCK_L  # tokens, whole blocks
    head, column = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)  # [BLOCK_H], [BLOCK_D]: key heads' dimensions in a row
    kv_head = column // DIM
    own = (head[:, None] // (HEADS // KV_HEADS) == kv_head[None, :]) & (head[:, None] < HEADS)
    q_offset = (row * HEADS + head[:, None]) * DIM + (column % DIM)[None, :]
    q = tl.load(q_ptr + q_offset, mask=own, other=0.0)  # [BLOCK_H, BLOCK_D]
    base = tl.load(lse_ptr + row * HEADS + head, mask=head < HEADS, other=float("inf"))  # others get no share
    k_column = kv_head * k_head_stride + column % DIM
    for start in range(split * part, tl.minimum(split * part + part, pages * PAGE), BLOCK_L):
        token = start + tl.arange(0, BLOCK_L)  # [BLOCK_L]
        live = token < length
        entry = tl.load(table_ptr + first + token // TABLE_PAGE, mask=live, other=0).to(tl.int64)
        slot = entry * TABLE_PAGE + token % TABLE_PAGE
        k_mask = (kv_head < KV_HEADS)[:, None] & live[None, :]
        k = tl.load(k_ptr + slot[None, :] * k_slot_stride + k_column[:, None], mask=k_mask, other=0.0)
        logit = tl.dot(q, k, input_precision=PRECISION) * scale  # [BLOCK_H, BLOCK_L]
        largest = tl.max(tl.exp(logit - base[:, None]), axis=0)  # share of a token
        shares = tl.reshape(tl.where(live, largest, 0.0), [BLOCK_L // PAGE, PAGE])
        page = start // PAGE + tl.arange(0, BLOCK_L // PAGE)
        tl.store(out_ptr + row * out_stride + page, tl.sum(shares, axis=1), mask=page < pages)


@triton.jit
def _select_kernel(
    scores_ptr, table_ptr, starts_ptr, lengths_ptr, out_table_ptr, out_starts_ptr, out_lengths_ptr,
    scores_stride, table_stride, out_stride,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ENTRIES: tl.constexpr, BUDGET: tl.constexpr, RECENT: tl.constexpr,
    SINKS: tl.constexpr, LISTED: tl.constexpr, OUT_LISTED: tl.constexpr,
):  # fmt: skip
    """The page table of one request."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    pages = tl.cdiv(length, PAGE)
    page = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    newest = tl.where(pages > BUDGET, pages - RECENT, 0)  # from here on all are taken
    open_ = (page >= SINKS) & (page < newest)  # for the scores to decide
    wanted = BUDGET - RECENT - SINKS
    # scores are at least 0, so their bits are ordered as they are; pages that are not open rank below all
    bits = tl.load(scores_ptr + row * scores_stride + page, mask=open_, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where(open_, bits, -1)
    low, high = 0, 0x7F800000
    for _ in range(31):  # the highest threshold that leaves enough at or above it
        middle = low + (high - low + 1) // 2
        enough = tl.sum((bits >= middle).to(tl.int32)) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    above, equal = bits > low, bits == low
    room = wanted - tl.sum(above.to(tl.int32))
    lower = equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room)  # of equal scores the lower pages
    taken = (page < pages) & (above | lower | (page < SINKS) | (page >= newest))
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    first = tl.load(starts_ptr + row) if LISTED else row * table_stride
    out_first = tl.load(out_starts_ptr + row) if OUT_LISTED else row * out_stride
    for number in tl.static_range(ENTRIES):
        source = page * ENTRIES + number
        held = taken & (source * (PAGE // ENTRIES) < length)
        entry = tl.load(table_ptr + first + source, mask=held, other=0)
        tl.store(out_table_ptr + out_first + place * ENTRIES + number, entry, mask=held)
    tl.store(out_lengths_ptr + row, tl.minimum(pages, BUDGET) * PAGE - (pages * PAGE - length))


def page_scores(
    q: Tensor,
    k: Tensor,
    table: Tensor,
    lengths: Tensor,
    lse: Tensor,
    scale: float,
    budget: PageBudget,
    table_page: int,
    starts: Tensor | None,
    out: Tensor,
    splits: int,
) -> None:
    """As the definition; `k` may have strides of its own, but for its last axis."""
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    block_d = max(16, triton.next_power_of_2(kv_heads * dim))
    _scores_kernel[(len(q), splits)](
        q, k, table, lengths if starts is None else starts, lengths, lse, out, scale,
        k.stride(0), k.stride(1), table.stride(0), out.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
        BLOCK_H=max(16, triton.next_power_of_2(heads)), BLOCK_D=block_d,
        PAGE=budget.page_tokens, TABLE_PAGE=table_page, BUDGET=budget.pages,
        SPLITS=splits, LISTED=starts is not None, PRECISION="ieee",
        **_tiles(block_d * q.element_size(), budget.page_tokens),
    )  # fmt: skip


def _tiles(key_bytes: int, page_tokens: int) -> dict[str, int]:
    """Keys of a block and how far they are read ahead, by the bytes of a token's keys: blocks in flight fit on chip."""
    block = max(16, min(64, (32 << 10) // key_bytes))
    return {"BLOCK_L": max(block, page_tokens), "num_warps": 4, "num_stages": 3}


def select_pages(
    scores: Tensor,
    table: Tensor,
    lengths: Tensor,
    budget: PageBudget,
    table_page: int,
    starts: Tensor | None,
    out_table: Tensor,
    out_starts: Tensor | None,
    out_lengths: Tensor,
) -> None:
    """As the definition."""
    _select_kernel[(len(scores),)](
        scores, table, lengths if starts is None else starts, lengths,
        out_table, lengths if out_starts is None else out_starts, out_lengths,
        scores.stride(0), table.stride(0), out_table.stride(0),
        BLOCK_N=triton.next_power_of_2(scores.shape[1]), PAGE=budget.page_tokens,
        ENTRIES=budget.page_tokens // table_page, BUDGET=budget.pages, RECENT=budget.recent_pages,
        SINKS=budget.sink_pages, LISTED=starts is not None, OUT_LISTED=out_starts is not None,
    )  # fmt: skip
