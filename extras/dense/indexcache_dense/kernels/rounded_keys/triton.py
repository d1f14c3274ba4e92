"""One read of the rounded keys, which leaves shares of a few tokens each; then the largest. Shapes are static."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_dense.kernels.page_selection.memory import StepMemory
from indexcache_dense.kernels.page_selection.triton import due_steps, skipped, table_of
from indexcache_dense.kernels.pages import CachedPages, PageBudget
from indexcache_dense.kernels.rounded_keys.naive import LEVELS, RoundedKeys
from indexcache_kernels.heads import arithmetic

_PROGRAMS = 1280  # that keep a device busy, and run at once: 10 on each of an H100's 132 multiprocessors
_UNIT: tl.constexpr = tl.constexpr(16)  # tokens whose shares are summed first; smaller pages are units themselves
_LEAST: tl.constexpr = tl.constexpr(-1e30)  # below any product; infinity less infinity is NaN
_LOG2: tl.constexpr = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")
_UNPACK = """
{
.reg .b32 low, high;
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, EXPONENT, 0x4140;
prmt.b32 $1, low, EXPONENT, 0x4342;
prmt.b32 $2, high, EXPONENT, 0x4140;
prmt.b32 $3, high, EXPONENT, 0x4342;
}
"""  # of four bytes: a code is the low byte of a number, whose high byte makes the last bit count 1
_UNPACK_BFLOAT16: tl.constexpr = tl.constexpr(_UNPACK.replace("EXPONENT", "0x43434343"))
_UNPACK_FLOAT16: tl.constexpr = tl.constexpr(_UNPACK.replace("EXPONENT", "0x64646464"))


@triton.jit
def _round_kernel(
    k_ptr, codes_ptr, ranges_ptr, table_ptr, starts_ptr, lengths_ptr, slots, k_slot_stride, k_head_stride, table_stride,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, TABLE_PAGE: tl.constexpr, LEVELS: tl.constexpr,
    NEWEST: tl.constexpr, SPLITS: tl.constexpr, LISTED: tl.constexpr,
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
        own = kv_head.to(tl.int64) * slots + slot
        tl.store(codes_ptr + own[:, None] * HALF + dim[None, :], (low_bits | (high_bits << 4)).to(tl.uint8), mask=mask)
        tl.store(ranges_ptr + own * 2, low, mask=live)
        tl.store(ranges_ptr + own * 2 + 1, step, mask=live)


@triton.jit
def _numbers(codes, dtype: tl.constexpr, FAST: tl.constexpr):
    """Split bytes into two codes each, as numbers; return also how much too large all of them are."""
    if not FAST:
        low, high, excess = (codes & 15).to(dtype), (codes >> 4).to(dtype), 0.0
    elif dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _UNPACK_BFLOAT16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        excess = 128.0
    else:
        low, high = tl.inline_asm_elementwise(
            _UNPACK_FLOAT16, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        excess = 1024.0
    return low, high, excess


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """Take a logarithm by one instruction; `tl.log2` has 25."""
    if FAST:
        found = tl.inline_asm_elementwise(_LOG2, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        found = tl.log2(x)
    return found


@triton.jit
def _tokens(row, TILE: tl.constexpr):
    """Return which token of a tile a row of its product is, where a unit is `_UNIT` tokens.

    Tensor cores leave rows r, r + 8, r + TILE / 2 and r + TILE / 2 + 8 to one thread. In this order these, and those of
    the three threads beside it, are a unit, so two shuffles find its sum. In another layout it is as right, but slower.
    """
    half: tl.constexpr = TILE // 2
    unit = row % half // 16 * 2 + row % 8 // 4
    return unit * _UNIT + row // half * 8 + row % 16 // 8 * 4 + row % 4


@triton.jit
def _slots(entries_ptr, token, length, TABLE_PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Return the slots of these tokens; for tokens behind the last one such as lie first."""
    if MASKED:
        entry = tl.load(entries_ptr + token // TABLE_PAGE, mask=token < length, other=0).to(tl.int64)
    else:
        entry = tl.load(entries_ptr + token // TABLE_PAGE).to(tl.int64)
    return entry * TABLE_PAGE + token % TABLE_PAGE


@triton.jit
def _units(
    q_first, q_second, whole_q, scale, low_and_step, codes_ptr, entries_ptr, token, length,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
    TABLE_PAGE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sum what heads give to each UNIT tokens of a tile, in logarithms to base 2: `[TILE // UNIT, BLOCK_H]`."""
    dim = tl.arange(0, BLOCK_D)
    slot = _slots(entries_ptr, token, length, TABLE_PAGE, MASKED)
    ptrs = codes_ptr + slot[:, None] * HALF + dim[None, :]  # [TILE, BLOCK_D]
    codes = tl.load(ptrs) if BLOCK_D == HALF else tl.load(ptrs, mask=(dim < HALF)[None, :], other=0)
    low = low_and_step.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    step = (low_and_step >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    near, far, excess = _numbers(codes, q_first.dtype, FAST)
    product = tl.dot(near, tl.trans(q_first), input_precision=PRECISION)  # [TILE, BLOCK_H]
    product = tl.dot(far, tl.trans(q_second), product, input_precision=PRECISION)
    product = product * (step * scale)[:, None] + (low - excess * step)[:, None] * whole_q[None, :]
    if MASKED:
        product = tl.where((token < length)[:, None], product, _LEAST)
    if UNIT == _UNIT:
        product = tl.reshape(product, [2, TILE // 32, 2, 2, 4, BLOCK_H])
        most = tl.max(tl.max(tl.max(product, 0), 1), 2)  # [TILE // 32, 2, BLOCK_H]
        weights = tl.exp2(product - most[None, :, None, :, None, :])
        found = _log2(tl.sum(tl.sum(tl.sum(weights, 0), 1), 2), FAST) + most
    else:
        product = tl.reshape(product, [TILE // UNIT, UNIT, BLOCK_H])
        most = tl.max(product, 1)
        found = _log2(tl.sum(tl.exp2(product - most[:, None, :]), 1), FAST) + most
    return tl.reshape(found, [TILE // UNIT, BLOCK_H])


@triton.jit
def _with(found, highest, total):
    """Add powers of 2 to a sum of such, of which `total` is what is left over the `highest`."""
    most = tl.maximum(highest, found)
    return most, total * tl.exp2(highest - most) + tl.exp2(found - most)


@triton.jit
def _shares_kernel(
    q_ptr, codes_ptr, ranges_ptr, table_ptr, starts_ptr, lengths_ptr, requests_ptr, steps_ptr, parts_ptr, highest_ptr,
    total_ptr, scale, slots, table_stride, num_heads, room,
    GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr,
    UNIT: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, TABLE_PAGE: tl.constexpr, BUDGET: tl.constexpr,
    LISTED: tl.constexpr, EVERY: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Write the logarithm of what the heads of a key head give to each UNIT tokens of a part of a request.

    Also kept are the part's highest logarithm and its sum. `scale` is that of powers of 2.
    """
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    if skipped(tl.cdiv(length, PAGE), requests_ptr, steps_ptr, row, BUDGET, EVERY):
        return
    table_ptr += tl.load(starts_ptr + row) if LISTED else row * table_stride
    group_head, dim = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    head, head_mask = row * num_heads + kv_head * GROUP + group_head, group_head < GROUP
    known = (dim < HALF)[None, :]
    ptrs = q_ptr + (head * HALF * 2)[:, None] + dim[None, :]
    q_first = tl.load(ptrs, mask=head_mask[:, None] & known, other=0.0)  # [BLOCK_H, BLOCK_D]
    q_second = tl.load(ptrs + HALF, mask=head_mask[:, None] & known, other=0.0)
    if UPCAST:
        q_first, q_second = q_first.to(tl.float32), q_second.to(tl.float32)
    whole_q = (tl.sum(q_first.to(tl.float32), 1) + tl.sum(q_second.to(tl.float32), 1)) * scale  # [BLOCK_H]
    size = tl.cdiv(tl.cdiv(length, PARTS), TILE) * TILE
    begin = part * size
    end = tl.minimum(begin + size, length)
    unit, row_token = tl.arange(0, TILE // UNIT), tl.arange(0, TILE)
    if UNIT == _UNIT:
        row_token = _tokens(row_token, TILE)
    highest = tl.full((TILE // UNIT, BLOCK_H), _LEAST, tl.float32)
    total = tl.zeros((TILE // UNIT, BLOCK_H), tl.float32)
    stored = parts_ptr + head[None, :] * room + unit[:, None]
    last = begin + tl.maximum(end - begin, 0) // TILE * TILE  # of the tiles, where one is not full
    # The compiler loads ahead what a product needs, codes. Ranges are loaded ahead here, and before that their slots.
    first_row = kv_head.to(tl.int64) * slots
    codes_ptr += first_row * HALF
    ranges_ptr = ranges_ptr.to(tl.pointer_type(tl.uint32)) + first_row
    token = begin + row_token
    slot = _slots(table_ptr, token, length, TABLE_PAGE, MASKED=True)
    low_and_step = tl.load(ranges_ptr + slot)
    slot = _slots(table_ptr, token + TILE, length, TABLE_PAGE, MASKED=True)
    for first in range(begin, last, TILE):
        token = first + row_token
        ahead = tl.load(ranges_ptr + slot)
        slot = _slots(table_ptr, token + 2 * TILE, length, TABLE_PAGE, MASKED=True)
        found = _units(
            q_first, q_second, whole_q, scale, low_and_step, codes_ptr, table_ptr, token, length, HALF, BLOCK_D,
            BLOCK_H, TILE, UNIT, TABLE_PAGE, PRECISION, FAST, MASKED=False,
        )  # fmt: skip
        tl.store(stored + first // UNIT, found, mask=head_mask[None, :])
        highest, total = _with(found, highest, total)
        low_and_step = ahead
    if last < end:
        found = _units(
            q_first, q_second, whole_q, scale, low_and_step, codes_ptr, table_ptr, last + row_token, length, HALF,
            BLOCK_D, BLOCK_H, TILE, UNIT, TABLE_PAGE, PRECISION, FAST, MASKED=True,
        )  # fmt: skip
        inside = (last + unit * UNIT < length)[:, None]
        tl.store(stored + last // UNIT, found, mask=inside & head_mask[None, :])
        highest, total = _with(found, highest, total)
    most = tl.max(highest, 0)  # [BLOCK_H]
    tl.store(highest_ptr + head * PARTS + part, most, mask=head_mask)
    tl.store(total_ptr + head * PARTS + part, tl.sum(total * tl.exp2(highest - most[None, :]), 0), mask=head_mask)


@triton.jit
def _largest_kernel(
    lengths_ptr, requests_ptr, steps_ptr, parts_ptr, highest_ptr, total_ptr, out_ptr, out_stride, num_heads, room,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, TILE_N: tl.constexpr, INSIDE: tl.constexpr,
    UNIT: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, PAGE: tl.constexpr, BUDGET: tl.constexpr,
    EVERY: tl.constexpr,
):  # fmt: skip
    """Score `TILE_N` pages of one request, of INSIDE units each: over key heads, the sum of a head's largest share."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    pages = tl.cdiv(length, PAGE)
    if skipped(pages, requests_ptr, steps_ptr, row, BUDGET, EVERY):
        return
    if tile * TILE_N >= pages:
        return
    group_head, part = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_P)
    page = tile * TILE_N + tl.arange(0, TILE_N)
    unit = tile * TILE_N * INSIDE + tl.arange(0, TILE_N * INSIDE)
    known = (group_head < GROUP)[:, None]
    live = known & (unit * UNIT < length)[None, :]
    score = tl.zeros((TILE_N,), tl.float32)
    for kv_head in tl.range(KV_HEADS, loop_unroll_factor=4):
        head = row * num_heads + kv_head * GROUP + group_head
        offset, mask = head[:, None] * PARTS + part[None, :], known & (part < PARTS)[None, :]
        highest = tl.load(highest_ptr + offset, mask=mask, other=_LEAST)  # [BLOCK_H, BLOCK_P]
        most = tl.max(highest, 1)
        whole = tl.sum(tl.load(total_ptr + offset, mask=mask, other=1.0) * tl.exp2(highest - most[:, None]), 1)
        found = tl.load(parts_ptr + head[:, None] * room + unit[None, :], mask=live, other=0.0)
        shares = tl.where(live, tl.exp2(found - (most + tl.log2(whole))[:, None]), 0.0)
        by_page = tl.sum(tl.reshape(shares, [BLOCK_H, TILE_N, INSIDE]), 2)
        score += tl.max(by_page, 0)
    tl.store(out_ptr + row * out_stride + page, score, mask=page < pages)


def round_keys(k: Tensor, rounded: RoundedKeys, pages: CachedPages, newest: bool) -> None:
    """Compute `naive.round_keys`; `k` may have strides of its own, but for its last axis."""
    kv_heads, half = k.shape[1], k.shape[2] // 2
    splits = 1 if newest else max(1, _PROGRAMS // max(1, pages.batch * kv_heads))
    _round_kernel[(pages.batch, kv_heads, splits)](
        k_ptr=k, codes_ptr=rounded.codes, ranges_ptr=rounded.ranges, lengths_ptr=pages.lengths,
        k_slot_stride=k.stride(0), k_head_stride=k.stride(1), slots=rounded.codes.shape[1], HALF=half,
        BLOCK_D=triton.next_power_of_2(half), TILE=1 if newest else 32, TABLE_PAGE=pages.table_page, LEVELS=LEVELS,
        NEWEST=newest, SPLITS=splits, **table_of(pages),
    )  # fmt: skip


def rounded_scores(
    q: Tensor,
    rounded: RoundedKeys,
    pages: CachedPages,
    *,
    scale: float,
    budget: PageBudget,
    out: Tensor,
    splits: int | None,
    memory: StepMemory | None,
) -> None:
    """Compute `naive.rounded_scores`."""
    (batch, heads), (kv_heads, slots, half) = q.shape[:2], rounded.codes.shape
    page = budget.page_tokens
    tile = 32 if q.dtype == torch.float32 else 64  # tokens of a product
    unit = min(page, _UNIT.value)
    room, inside = out.shape[1] * (page // unit), page // unit
    parts = splits or max(1, min(64, _PROGRAMS // max(1, batch * kv_heads)))
    kept, highest, total = (
        torch.empty((batch, heads, count), dtype=torch.float32, device=q.device) for count in (room, parts, parts)
    )
    group = heads // kv_heads
    shared: dict[str, Any] = {
        "parts_ptr": kept, "highest_ptr": highest, "total_ptr": total, "num_heads": heads, "room": room,
        "GROUP": group, "UNIT": unit, "PARTS": parts, **due_steps(pages, budget, memory),
    }  # fmt: skip
    fast = q.is_cuda and torch.version.hip is None and q.dtype != torch.float32  # instructions of NVIDIA's
    _shares_kernel[(batch, kv_heads, parts)](
        q_ptr=q, codes_ptr=rounded.codes, ranges_ptr=rounded.ranges.view(torch.int32), scale=scale / math.log(2),
        slots=slots, HALF=half, BLOCK_D=max(16, triton.next_power_of_2(half)),
        BLOCK_H=max(8, triton.next_power_of_2(group)), TILE=tile, TABLE_PAGE=pages.table_page, FAST=fast,
        **table_of(pages), **shared, **arithmetic(q), num_warps=2, num_stages=2,
    )  # fmt: skip
    count = max(1, 32 // inside)  # pages of a program
    _largest_kernel[(batch, triton.cdiv(out.shape[1], count))](
        out_ptr=out, out_stride=out.stride(0), KV_HEADS=kv_heads, BLOCK_H=triton.next_power_of_2(group), TILE_N=count,
        INSIDE=inside, BLOCK_P=triton.next_power_of_2(parts), **shared, num_warps=1,
    )  # fmt: skip
