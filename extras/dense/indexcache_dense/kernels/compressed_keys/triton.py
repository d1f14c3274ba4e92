"""One read of the means, whose products are kept; then each page's largest share. Shapes are static."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_dense.kernels.compressed_keys.naive import GROUP
from indexcache_dense.kernels.page_selection.memory import StepMemory
from indexcache_dense.kernels.page_selection.triton import due_steps, skipped, table_of
from indexcache_dense.kernels.pages import CachedPages, PageBudget
from indexcache_kernels.heads import head_sizes, load_heads, products

_TILE = 64  # compressed keys of a product
_PROGRAMS = 1024  # that keep a device busy
_WIDTH = 512  # dimensions of a group's keys that a program averages at once


@triton.jit
def _means_kernel(
    k_ptr, means_ptr, table_ptr, starts_ptr, lengths_ptr, k_slot_stride, k_head_stride, table_stride, width,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, TABLE_PAGE: tl.constexpr, NEWEST: tl.constexpr,
    SPLITS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Average a part of one request's groups; NEWEST: the one that its newest token completes."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    complete = length // TOKENS
    if NEWEST:
        first, end = tl.where(length % TOKENS == 0, tl.maximum(complete - 1, 0), complete), complete
    else:
        size = tl.cdiv(complete, SPLITS)
        first, end = split * size, tl.minimum(split * size + size, complete)
    entries = tl.load(starts_ptr + row) if LISTED else row * table_stride
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH], of all key heads
    known = column < width
    number = tl.arange(0, TOKENS)
    for group in range(first, end):
        token = group * TOKENS
        slot = tl.load(table_ptr + entries + token // TABLE_PAGE).to(tl.int64) * TABLE_PAGE + token % TABLE_PAGE
        offset = (slot + number)[:, None] * k_slot_stride
        offset += (column // DIM * k_head_stride + column % DIM)[None, :]
        k = tl.load(k_ptr + offset, mask=known[None, :], other=0.0).to(tl.float32)  # [TOKENS, WIDTH]
        tl.store(means_ptr + slot // TOKENS * width + column, tl.sum(k, 0) / TOKENS, mask=known)


@triton.jit
def _mean_ptrs(means_ptr, table_ptr, entries, group, live, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
               TOKENS: tl.constexpr, TABLE_PAGE: tl.constexpr):  # fmt: skip
    """Point to the means of groups, `[TILE]`."""
    token = group * TOKENS
    entry = tl.load(table_ptr + entries + token // TABLE_PAGE, mask=live, other=0).to(tl.int64)
    return means_ptr + ((entry * TABLE_PAGE + token % TABLE_PAGE) // TOKENS * KV_HEADS + kv_head) * DIM


@triton.jit
def _products_kernel(
    q_ptr, means_ptr, table_ptr, starts_ptr, lengths_ptr, requests_ptr, steps_ptr, products_ptr, highest_ptr,
    total_ptr, scale, table_stride, num_heads, room,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr,
    TABLE_PAGE: tl.constexpr, BUDGET: tl.constexpr, LISTED: tl.constexpr, EVERY: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a part of a request's compressed keys with the heads of a key head; keep products, highest and sum."""
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    if skipped(tl.cdiv(length, PAGE), requests_ptr, steps_ptr, row, BUDGET, EVERY):
        return
    chunks = length // TOKENS - 1
    entries = tl.load(starts_ptr + row) if LISTED else row * table_stride
    group_head = tl.arange(0, BLOCK_H)
    head, head_mask = row * num_heads + kv_head * GROUP + group_head, group_head < GROUP
    q_main, q_tail = load_heads(q_ptr + head * DIM, head_mask, DIM, MAIN, TAIL, UPCAST)
    size = tl.cdiv(tl.cdiv(chunks, PARTS), TILE) * TILE
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(part * size, tl.minimum(part * size + size, chunks), TILE):
        chunk = first + tl.arange(0, TILE)
        live = chunk < chunks
        near = _mean_ptrs(means_ptr, table_ptr, entries, chunk, live, kv_head, KV_HEADS, DIM, TOKENS, TABLE_PAGE)
        k_main, k_tail = load_heads(near, live, DIM, MAIN, TAIL, UPCAST)
        score = products(q_main, q_tail, k_main, k_tail, scale / 2, PRECISION)  # [BLOCK_H, TILE]
        far = _mean_ptrs(means_ptr, table_ptr, entries, chunk + 1, live, kv_head, KV_HEADS, DIM, TOKENS, TABLE_PAGE)
        k_main, k_tail = load_heads(far, live, DIM, MAIN, TAIL, UPCAST)
        score += products(q_main, q_tail, k_main, k_tail, scale / 2, PRECISION)
        known = live[None, :] & head_mask[:, None]
        tl.store(products_ptr + head[:, None] * room + chunk[None, :], score, mask=known)
        score = tl.where(live[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
        highest = higher
    tl.store(highest_ptr + head * PARTS + part, highest, mask=head_mask)
    tl.store(total_ptr + head * PARTS + part, total, mask=head_mask)


@triton.jit
def _pages_kernel(
    lengths_ptr, requests_ptr, steps_ptr, products_ptr, highest_ptr, total_ptr, out_ptr, out_stride, num_heads, room,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, TILE_N: tl.constexpr, INSIDE: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, BUDGET: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Score `TILE_N` pages of one request: over key heads, the sum of the largest share of those that touch a page.

    That are the INSIDE compressed keys that begin in it and the one before, which reaches into it.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    pages = tl.cdiv(length, PAGE)
    if skipped(pages, requests_ptr, steps_ptr, row, BUDGET, EVERY):
        return
    if tile * TILE_N >= pages:
        return
    chunks = length // TOKENS - 1
    group_head, part = tl.arange(0, BLOCK_H), tl.arange(0, PARTS)
    page = tile * TILE_N + tl.arange(0, TILE_N)
    chunk = tile * TILE_N * INSIDE + tl.arange(0, TILE_N * INSIDE)
    before = page * INSIDE - 1
    known = (group_head < GROUP)[:, None]
    live, reaches = known & (chunk < chunks)[None, :], known & ((before >= 0) & (before < chunks))[None, :]
    score = tl.zeros((TILE_N,), tl.float32)
    for kv_head in range(KV_HEADS):
        head = row * num_heads + kv_head * GROUP + group_head
        offset = head[:, None] * PARTS + part[None, :]
        highest = tl.load(highest_ptr + offset, mask=known, other=0.0)  # [BLOCK_H, PARTS]
        most = tl.max(highest, 1)
        whole = tl.sum(tl.load(total_ptr + offset, mask=known, other=1.0) * tl.exp(highest - most[:, None]), 1)
        base = (most + tl.log(whole))[:, None]
        product = tl.load(products_ptr + head[:, None] * room + chunk[None, :], mask=live, other=0.0)
        shares = tl.sum(tl.where(live, tl.exp(product - base), 0.0), 0)  # [TILE_N * INSIDE]
        largest = tl.max(tl.reshape(shares, [TILE_N, INSIDE]), 1)
        product = tl.load(products_ptr + head[:, None] * room + before[None, :], mask=reaches, other=0.0)
        score += tl.maximum(largest, tl.sum(tl.where(reaches, tl.exp(product - base), 0.0), 0))
    tl.store(out_ptr + row * out_stride + page, score, mask=page < pages)


def update_means(k: Tensor, means: Tensor, pages: CachedPages, newest: bool) -> None:
    """Compute `naive.update_means`; `k` may have strides of its own, but for its last axis."""
    width = means.shape[1] * means.shape[2]
    block = min(_WIDTH, triton.next_power_of_2(width))
    splits = 1 if newest else max(1, _PROGRAMS // max(1, pages.batch))
    _means_kernel[(pages.batch, splits, triton.cdiv(width, block))](
        k_ptr=k, means_ptr=means, lengths_ptr=pages.lengths, k_slot_stride=k.stride(0), k_head_stride=k.stride(1),
        width=width, DIM=k.shape[2], WIDTH=block, TOKENS=GROUP, TABLE_PAGE=pages.table_page, NEWEST=newest,
        SPLITS=splits, **table_of(pages),
    )  # fmt: skip


def compressed_scores(
    q: Tensor,
    means: Tensor,
    pages: CachedPages,
    *,
    scale: float,
    budget: PageBudget,
    out: Tensor,
    splits: int | None,
    memory: StepMemory | None,
) -> None:
    """Compute `naive.compressed_scores`."""
    batch, heads, kv_heads = len(q), q.shape[1], means.shape[1]
    inside = budget.page_tokens // GROUP
    room = out.shape[1] * inside
    parts = splits or triton.next_power_of_2(max(1, min(16, _PROGRAMS // max(1, batch * kv_heads))))
    kept, highest, total = (
        torch.empty((batch, heads, count), dtype=torch.float32, device=q.device) for count in (room, parts, parts)
    )
    sizes: dict[str, Any] = head_sizes(q, kv_heads, 1 << 16)
    shared = {
        "products_ptr": kept, "highest_ptr": highest, "total_ptr": total, "num_heads": heads, "room": room,
        "KV_HEADS": kv_heads, "PARTS": parts, "TOKENS": GROUP, **due_steps(pages, budget, memory),
    }  # fmt: skip
    _products_kernel[(batch, kv_heads, parts)](
        q_ptr=q, means_ptr=means, scale=scale, TILE=_TILE, TABLE_PAGE=pages.table_page, **table_of(pages), **shared,
        **sizes,
    )  # fmt: skip
    tile = max(1, 128 // inside)  # pages of a program
    _pages_kernel[(batch, triton.cdiv(out.shape[1], tile))](
        out_ptr=out, out_stride=out.stride(0), GROUP=sizes["GROUP"],
        BLOCK_H=triton.next_power_of_2(sizes["GROUP"]), TILE_N=tile, INSIDE=inside, **shared,
    )  # fmt: skip
