"""Unions of selections by marks: a byte for each row of the cache, and a bit of it for each query of a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_lab.kernels.union_attention import TILE, Unions
from indexcache_lab.kernels.union_attention.naive import room_for

_PIECE = 2048  # marks that are read at a time
_MARKS = 1 << 27  # bytes for marks of all programs at most
_PROGRAMS = 256  # at most, so that marks of 128K rows stay in the cache of a GPU


@triton.jit(do_not_specialize=["tokens", "blocks", "cache"])  # so that no pass compiles it again
def _unite_kernel(
    table_ptr, marks_ptr, keys_ptr, owners_ptr, counts_ptr, tokens, blocks, cache, table_stride, marks_stride, room,
    TOPK: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Unite the selections of some blocks, one after the other; the program's marks are 0 before and after each.

    Within a row no byte is written by two threads with different values. Between rows all threads wait.
    """
    program = tl.program_id(0).to(tl.int64)
    marks_ptr += program * marks_stride
    slot, place = tl.arange(0, PADDED), tl.arange(0, PIECE)
    for turn in range(tl.cdiv(blocks - program, tl.num_programs(0))):
        block = program + turn * tl.num_programs(0)
        lowest = tl.full((PADDED,), 2147483647, tl.int32)
        highest = tl.full((PADDED,), -1, tl.int32)
        for number in range(QUERIES):
            token = block * QUERIES + number
            row_ptr = table_ptr + token * table_stride
            key = tl.load(row_ptr + slot, mask=slot < tl.where(token < tokens, TOPK, 0), other=-1)
            there = (key >= 0) & (key < cache)
            before = tl.load(marks_ptr + key, mask=there, other=0)
            tl.store(marks_ptr + key, before | (1 << number), mask=there)
            lowest = tl.minimum(lowest, tl.where(there, key, 2147483647))
            highest = tl.maximum(highest, tl.where(there, key, -1))
            tl.debug_barrier()
        first_key, last_key = tl.min(lowest, 0), tl.max(highest, 0)
        block_keys, block_owners = keys_ptr + block * room, owners_ptr + block * room
        count = 0
        for first in range(first_key // PIECE * PIECE, last_key + 1, PIECE):
            mark = tl.load(marks_ptr + first + place)
            tl.store(marks_ptr + first + place, tl.zeros((PIECE,), tl.uint8))
            found = (mark != 0).to(tl.int32)
            at = count + tl.cumsum(found, 0) - found
            tl.store(block_keys + at, first + place, mask=mark != 0)
            tl.store(block_owners + at, mark, mask=mark != 0)
            count += tl.sum(found, 0)
        behind = count + tl.arange(0, TILE)
        rest = behind < tl.cdiv(count, TILE) * TILE
        tl.store(block_keys + behind, tl.zeros((TILE,), tl.int32) + last_key, mask=rest)
        tl.store(block_owners + behind, tl.zeros((TILE,), tl.uint8), mask=rest)
        tl.store(counts_ptr + block, count)
        tl.debug_barrier()


def unite(table: Tensor, queries: int, cache: int) -> Unions:
    """See `indexcache_lab.kernels.union_attention.unite`.

    Args:
        table: `[T, K]`.
        queries: queries of a block.
        cache: rows of the cache.
    """
    keys, owners, counts = room_for(table, queries)
    blocks, topk = len(counts), table.shape[1]
    if blocks:
        stride = triton.cdiv(max(1, cache), _PIECE) * _PIECE
        programs = max(1, min(blocks, _PROGRAMS, _MARKS // stride))
        marks = torch.zeros((programs, stride), dtype=torch.uint8, device=table.device)
        _unite_kernel[(programs,)](
            table, marks, keys, owners, counts, len(table), blocks, cache, table.stride(0), stride, keys.shape[1],
            TOPK=topk, PADDED=triton.next_power_of_2(max(1, topk)), QUERIES=queries, PIECE=_PIECE, TILE=TILE,
            num_warps=8, num_stages=1,
        )  # fmt: skip
    return Unions(keys, owners, counts, queries, len(table), cache)
