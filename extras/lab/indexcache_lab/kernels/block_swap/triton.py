"""One program a request finds hits and misses; programs of the copy read host memory where it is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # words of a program's turn
_PROGRAMS = 8  # of one block


@triton.jit
def _swap_kernel(
    requested_ptr, new_block_ptr, blocks_ptr, order_ptr, slots_ptr, needs_copy_ptr,
    requested_stride, slots_stride, needs_copy_stride, SLOTS, COUNT, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position, number = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    live = position < SLOTS
    slot = tl.load(order_ptr + row * SLOTS + position, mask=live, other=0)  # [BLOCK_N], by use
    block = tl.load(blocks_ptr + row * SLOTS + slot, mask=live, other=-1)
    requested = tl.load(requested_ptr + row * requested_stride + number, mask=number < COUNT, other=-1)  # [BLOCK_K]
    same = (block[:, None] == requested[None, :]) & (requested >= 0)[None, :] & live[:, None]
    hit = tl.sum(same.to(tl.int32), axis=1) > 0
    missing = (requested >= 0) & (tl.sum(same.to(tl.int32), axis=0) == 0)
    stale = live & (hit == 0)
    misses, stales = tl.sum(missing.to(tl.int32)), tl.sum(stale.to(tl.int32))
    rank = tl.cumsum(stale.to(tl.int32), axis=0) - 1  # among those that can go
    turn = tl.cumsum(missing.to(tl.int32), axis=0) - 1
    given = stale[:, None] & missing[None, :] & (rank[:, None] == turn[None, :])
    own = tl.sum(tl.where(same | given, slot[:, None], 0), axis=0)  # [BLOCK_K]
    after_hits = stales + tl.cumsum(hit.to(tl.int32), axis=0) - 1
    after = tl.where(hit, after_hits, tl.where(rank < misses, stales - misses + rank, rank - misses))
    tl.debug_barrier()  # all is read before anything is written
    tl.store(order_ptr + row * SLOTS + after, slot, mask=live)
    tl.store(blocks_ptr + row * SLOTS + own, requested, mask=missing)
    known = number < COUNT
    tl.store(slots_ptr + row * slots_stride + number, tl.where(requested >= 0, own, -1), mask=known)
    load = missing & (requested != tl.load(new_block_ptr + row))
    tl.store(needs_copy_ptr + row * needs_copy_stride + number, load.to(tl.int8), mask=known)


@triton.jit
def _copy_kernel(
    source_ptr, target_ptr, requested_ptr, slots_ptr, needs_copy_ptr,
    source_row, source_block, target_row, target_slot, requested_stride, slots_stride, needs_copy_stride, WORDS,
    CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row, number, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if tl.load(needs_copy_ptr + row * needs_copy_stride + number) == 0:
        return
    block = tl.load(requested_ptr + row * requested_stride + number).to(tl.int64)
    slot = tl.load(slots_ptr + row * slots_stride + number).to(tl.int64)
    read = source_ptr + row * source_row + block * source_block
    write = target_ptr + row * target_row + slot * target_slot
    for start in range(part * CHUNK, WORDS, PROGRAMS * CHUNK):
        word = start + tl.arange(0, CHUNK)
        tl.store(write + word, tl.load(read + word, mask=word < WORDS), mask=word < WORDS)


def swap_blocks(
    requested: Tensor, new_block: Tensor, *, blocks: Tensor, order: Tensor, slots: Tensor, needs_copy: Tensor
) -> None:
    """Compute `naive.swap_blocks`."""
    block_n, block_k = (triton.next_power_of_2(item.shape[1]) for item in (blocks, requested))
    _swap_kernel[(len(requested),)](
        requested_ptr=requested, new_block_ptr=new_block, blocks_ptr=blocks, order_ptr=order, slots_ptr=slots,
        needs_copy_ptr=needs_copy.view(torch.int8), requested_stride=requested.stride(0), slots_stride=slots.stride(0),
        needs_copy_stride=needs_copy.stride(0), SLOTS=blocks.shape[1], COUNT=requested.shape[1], BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=8 if block_n * block_k <= 16384 else 16,
    )  # fmt: skip


def copy_blocks(source: Tensor, target: Tensor, requested: Tensor, slots: Tensor, needs_copy: Tensor) -> None:
    """Compute `naive.copy_blocks`; blocks are a multiple of 8 bytes."""
    source, target = (item.flatten(2).view(torch.int64) for item in (source, target))
    _copy_kernel[(*requested.shape, _PROGRAMS)](
        source_ptr=source, target_ptr=target, requested_ptr=requested, slots_ptr=slots,
        needs_copy_ptr=needs_copy.view(torch.int8), source_row=source.stride(0), source_block=source.stride(1),
        target_row=target.stride(0), target_slot=target.stride(1), requested_stride=requested.stride(0),
        slots_stride=slots.stride(0), needs_copy_stride=needs_copy.stride(0), WORDS=source.shape[2], CHUNK=_CHUNK,
        PROGRAMS=_PROGRAMS, num_warps=4,
    )  # fmt: skip
