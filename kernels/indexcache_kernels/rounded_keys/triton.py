"""One read of the rounded keys, which leaves shares of a few tokens each; then the largest. Shapes are static."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import arithmetic
from indexcache_kernels.page_selection.memory import StepMemory
from indexcache_kernels.page_selection.pages import CachedPages
from indexcache_kernels.page_selection.triton import due_steps, pages_of, skipped
from indexcache_kernels.rounded_keys.naive import LEVELS, RoundedKeys

_TILE = 64  # tokens of a product
_PROGRAMS = 1024  # that keep a device busy


@triton.jit
def _round_kernel(
    k_ptr, codes_ptr, ranges_ptr, table_ptr, starts_ptr, lengths_ptr, k_slot_stride, k_head_stride, table_stride,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, TABLE_PAGE: tl.constexpr,
    LEVELS: tl.constexpr, NEWEST: tl.constexpr, SPLITS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Round a part of one request's keys of one key head; NEWEST: the newest one."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    if NEWEST:
        first, end = tl.maximum(length - 1, 0), length
    else:
        size = tl.cdiv(length, SPLITS)
        first, end = split * size, tl.minimum(split * size + size, length)
    entries = tl.load(starts_ptr + row) if LISTED else row * table_stride
    dim = tl.arange(0, BLOCK_D)
    known = (dim < HALF)[None, :]
    for start in range(first, end, TILE):
        token = start + tl.arange(0, TILE)
        live = token < end
        entry = tl.load(table_ptr + entries + token // TABLE_PAGE, mask=live, other=0).to(tl.int64)
        slot = entry * TABLE_PAGE + token % TABLE_PAGE
        ptrs = k_ptr + (slot * k_slot_stride + kv_head * k_head_stride)[:, None] + dim[None, :]
        mask = live[:, None] & known
        first_half = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # [TILE, BLOCK_D]
        second_half = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
        least = tl.min(tl.where(known, tl.minimum(first_half, second_half), float("inf")), 1)
        most = tl.max(tl.where(known, tl.maximum(first_half, second_half), float("-inf")), 1)
        low = least.to(tl.float16)
        base = low.to(tl.float32)
        step = ((most - base) / LEVELS).to(tl.float16)
        unit = tl.where(step > 0, step.to(tl.float32), float("inf"))
        low_bits = tl.floor((first_half - base[:, None]) / unit[:, None] + 0.5)
        high_bits = tl.floor((second_half - base[:, None]) / unit[:, None] + 0.5)
        low_bits = tl.minimum(tl.maximum(low_bits, 0.0), LEVELS).to(tl.int32)
        high_bits = tl.minimum(tl.maximum(high_bits, 0.0), LEVELS).to(tl.int32)
        own = slot * KV_HEADS + kv_head
        tl.store(codes_ptr + own[:, None] * HALF + dim[None, :], (low_bits | (high_bits << 4)).to(tl.uint8), mask=mask)
        tl.store(ranges_ptr + own * 2, low, mask=live)
        tl.store(ranges_ptr + own * 2 + 1, step, mask=live)


@triton.jit
def _shares_kernel(
    q_ptr, codes_ptr, ranges_ptr, table_ptr, starts_ptr, lengths_ptr, requests_ptr, steps_ptr, parts_ptr, highest_ptr,
    total_ptr, scale, table_stride, num_heads, room,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, TABLE_PAGE: tl.constexpr,
    BUDGET: tl.constexpr, LISTED: tl.constexpr, EVERY: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum what the heads of a key head give to each UNIT tokens of a part of a request, in logarithms.

    Also kept are the part's highest product and its sum.
    """
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    if skipped(tl.cdiv(length, PAGE), requests_ptr, steps_ptr, row, BUDGET, EVERY):
        return
    entries = tl.load(starts_ptr + row) if LISTED else row * table_stride
    group_head, dim = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    head, head_mask = row * num_heads + kv_head * GROUP + group_head, group_head < GROUP
    known = (dim < HALF)[None, :]
    ptrs = q_ptr + (head * HALF * 2)[:, None] + dim[None, :]
    q_first = tl.load(ptrs, mask=head_mask[:, None] & known, other=0.0)  # [BLOCK_H, BLOCK_D]
    q_second = tl.load(ptrs + HALF, mask=head_mask[:, None] & known, other=0.0)
    if UPCAST:
        q_first, q_second = q_first.to(tl.float32), q_second.to(tl.float32)
    whole_q = tl.sum(q_first.to(tl.float32), 1) + tl.sum(q_second.to(tl.float32), 1)  # [BLOCK_H]
    size = tl.cdiv(tl.cdiv(length, PARTS), TILE) * TILE
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(part * size, tl.minimum(part * size + size, length), TILE):
        token = first + tl.arange(0, TILE)
        live = token < length
        entry = tl.load(table_ptr + entries + token // TABLE_PAGE, mask=live, other=0).to(tl.int64)
        own = (entry * TABLE_PAGE + token % TABLE_PAGE) * KV_HEADS + kv_head
        mask = live[:, None] & known
        codes = tl.load(codes_ptr + own[:, None] * HALF + dim[None, :], mask=mask, other=0)  # [TILE, BLOCK_D]
        low = tl.load(ranges_ptr + own * 2, mask=live, other=0.0).to(tl.float32)
        step = tl.load(ranges_ptr + own * 2 + 1, mask=live, other=0.0).to(tl.float32)
        near = (codes & 15).to(q_first.dtype)
        far = (codes >> 4).to(q_first.dtype)
        product = tl.dot(q_first, tl.trans(near), input_precision=PRECISION)  # [BLOCK_H, TILE]
        product = tl.dot(q_second, tl.trans(far), product, input_precision=PRECISION)
        product = (product * step[None, :] + whole_q[:, None] * low[None, :]) * scale
        product = tl.where(live[None, :], product, float("-inf"))
        higher = tl.max(product, 1)
        weights = tl.exp(product - higher[:, None])
        by_unit = tl.sum(tl.reshape(weights, [BLOCK_H, TILE // UNIT, UNIT]), 2)
        unit = first // UNIT + tl.arange(0, TILE // UNIT)
        found = tl.log(by_unit) + higher[:, None]
        inside = (unit * UNIT < length)[None, :] & head_mask[:, None]
        tl.store(parts_ptr + head[:, None] * room + unit[None, :], found, mask=inside)
        both = tl.maximum(highest, higher)
        total = total * tl.exp(highest - both) + tl.sum(weights, 1) * tl.exp(higher - both)
        highest = both
    tl.store(highest_ptr + head * PARTS + part, highest, mask=head_mask)
    tl.store(total_ptr + head * PARTS + part, total, mask=head_mask)


@triton.jit
def _largest_kernel(
    lengths_ptr, requests_ptr, steps_ptr, parts_ptr, highest_ptr, total_ptr, out_ptr, out_stride, num_heads, room,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, TILE_N: tl.constexpr, INSIDE: tl.constexpr,
    UNIT: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, BUDGET: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Score `TILE_N` pages of one request, of INSIDE units each: over key heads, the sum of a head's largest share."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    pages = tl.cdiv(length, PAGE)
    if skipped(pages, requests_ptr, steps_ptr, row, BUDGET, EVERY):
        return
    if tile * TILE_N >= pages:
        return
    group_head, part = tl.arange(0, BLOCK_H), tl.arange(0, PARTS)
    page = tile * TILE_N + tl.arange(0, TILE_N)
    unit = tile * TILE_N * INSIDE + tl.arange(0, TILE_N * INSIDE)
    known = (group_head < GROUP)[:, None]
    live = known & (unit * UNIT < length)[None, :]
    score = tl.zeros((TILE_N,), tl.float32)
    for kv_head in range(KV_HEADS):
        head = row * num_heads + kv_head * GROUP + group_head
        offset = head[:, None] * PARTS + part[None, :]
        highest = tl.load(highest_ptr + offset, mask=known, other=0.0)  # [BLOCK_H, PARTS]
        most = tl.max(highest, 1)
        whole = tl.sum(tl.load(total_ptr + offset, mask=known, other=1.0) * tl.exp(highest - most[:, None]), 1)
        found = tl.load(parts_ptr + head[:, None] * room + unit[None, :], mask=live, other=0.0)
        shares = tl.where(live, tl.exp(found - (most + tl.log(whole))[:, None]), 0.0)
        by_page = tl.sum(tl.reshape(shares, [BLOCK_H, TILE_N, INSIDE]), 2)
        score += tl.max(by_page, 0)
    tl.store(out_ptr + row * out_stride + page, score, mask=page < pages)


def round_keys(
    k: Tensor,
    rounded: RoundedKeys,
    table: Tensor,
    lengths: Tensor,
    table_page: int,
    starts: Tensor | None,
    newest: bool,
) -> None:
    """Compute `naive.round_keys`; `k` may have strides of its own, but for its last axis."""
    batch, kv_heads, half = len(lengths), k.shape[1], k.shape[2] // 2
    splits = 1 if newest else max(1, _PROGRAMS // max(1, batch * kv_heads))
    _round_kernel[(batch, kv_heads, splits)](
        k_ptr=k, codes_ptr=rounded.codes, ranges_ptr=rounded.ranges, table_ptr=table,
        starts_ptr=lengths if starts is None else starts, lengths_ptr=lengths, k_slot_stride=k.stride(0),
        k_head_stride=k.stride(1), table_stride=table.stride(0), KV_HEADS=kv_heads, HALF=half,
        BLOCK_D=triton.next_power_of_2(half), TILE=1 if newest else 32, TABLE_PAGE=table_page, LEVELS=LEVELS,
        NEWEST=newest, SPLITS=splits, LISTED=starts is not None,
    )  # fmt: skip


def rounded_scores(
    q: Tensor,
    rounded: RoundedKeys,
    pages: CachedPages,
    *,
    scale: float,
    out: Tensor,
    splits: int | None,
    memory: StepMemory | None,
) -> None:
    """Compute `naive.rounded_scores`."""
    (batch, heads), (_, kv_heads, half) = q.shape[:2], rounded.codes.shape
    page = pages.budget.page_tokens
    unit = min(page, _TILE)  # tokens whose shares are summed first
    room, inside = out.shape[1] * (page // unit), page // unit
    parts = splits or triton.next_power_of_2(max(1, min(16, _PROGRAMS // max(1, batch * kv_heads))))
    kept, highest, total = (
        torch.empty((batch, heads, count), dtype=torch.float32, device=q.device) for count in (room, parts, parts)
    )
    group, listed = heads // kv_heads, pages_of(pages)
    where = {name: listed.pop(name) for name in ("table_ptr", "starts_ptr", "table_stride", "LISTED")}
    shared: dict[str, Any] = {
        **listed, "parts_ptr": kept, "highest_ptr": highest, "total_ptr": total, "num_heads": heads, "room": room,
        "KV_HEADS": kv_heads, "GROUP": group, "UNIT": unit, "PARTS": parts, **due_steps(pages, memory),
    }  # fmt: skip
    _shares_kernel[(batch, kv_heads, parts)](
        q_ptr=q, codes_ptr=rounded.codes, ranges_ptr=rounded.ranges, scale=scale, HALF=half,
        BLOCK_D=max(16, triton.next_power_of_2(half)), BLOCK_H=max(16, triton.next_power_of_2(group)), TILE=_TILE,
        TABLE_PAGE=pages.table_page, **where, **shared, **arithmetic(q),
    )  # fmt: skip
    tile = max(1, 128 // inside)  # pages of a program
    _largest_kernel[(batch, triton.cdiv(out.shape[1], tile))](
        out_ptr=out, out_stride=out.stride(0), BLOCK_H=triton.next_power_of_2(group), TILE_N=tile, INSIDE=inside,
        **shared,
    )  # fmt: skip
