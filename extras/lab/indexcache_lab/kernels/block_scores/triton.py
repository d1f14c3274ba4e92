"""Denominators of all compressed keys first, in parts; then each block's largest share. Shapes are static."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.heads import head_sizes, load_heads, products
from indexcache_lab.kernels.block_scores.naive import CHUNK, STRIDE

_TILE = 64  # compressed keys of a product
_PROGRAMS = 512  # that keep a device busy


@triton.jit
def _chunks(length, room, CHUNK: tl.constexpr, STRIDE: tl.constexpr):
    """Count the compressed keys that a query over `length` tokens sees to their end; there are `room`."""
    return tl.minimum(tl.where(length >= CHUNK, (length - CHUNK) // STRIDE + 1, 0), room)


@triton.jit
def _parts_kernel(
    q_ptr, k_ptr, lengths_ptr, highest_ptr, total_ptr, scale, k_batch_stride, k_head_stride, k_row_stride, num_heads,
    room, GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, STRIDE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Find highest product and denominator for a part of a request's compressed keys and the heads of a key head."""
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group_head = tl.arange(0, BLOCK_H)
    head, head_mask = row * num_heads + kv_head * GROUP + group_head, group_head < GROUP
    q_main, q_tail = load_heads(q_ptr + head * DIM, head_mask, DIM, MAIN, TAIL, UPCAST)
    chunks = _chunks(tl.load(lengths_ptr + row), room, CHUNK, STRIDE)
    size = tl.cdiv(tl.cdiv(chunks, PARTS), TILE) * TILE
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    keys = k_ptr + row * k_batch_stride + kv_head * k_head_stride
    for first in range(part * size, tl.minimum(part * size + size, chunks), TILE):
        chunk = first + tl.arange(0, TILE)
        k_main, k_tail = load_heads(keys + chunk * k_row_stride, chunk < chunks, DIM, MAIN, TAIL, UPCAST)
        score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)  # [BLOCK_H, TILE]
        score = tl.where((chunk < chunks)[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
        highest = higher
    offset = head * PARTS + part
    tl.store(highest_ptr + offset, highest, mask=head_mask)
    tl.store(total_ptr + offset, total, mask=head_mask)


@triton.jit
def _shares(q_main, q_tail, base, head_mask, keys, k_row_stride, chunk, live, scale, DIM: tl.constexpr,
            MAIN: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return the shares of some compressed keys, summed over heads."""
    k_main, k_tail = load_heads(keys + chunk * k_row_stride, live, DIM, MAIN, TAIL, UPCAST)
    score = products(q_main, q_tail, k_main, k_tail, scale, PRECISION)
    return tl.sum(tl.where(live[None, :] & head_mask[:, None], tl.exp(score - base[:, None]), 0.0), 0)


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, lengths_ptr, highest_ptr, total_ptr, out_ptr, scale, k_batch_stride, k_head_stride, k_row_stride,
    num_heads, room, num_kv_heads, blocks,
    GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr,
    INSIDE: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, STRIDE: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Score `TILE_N` blocks of one request and key head.

    A block gets the largest share among the INSIDE compressed keys that begin in it and the one before, which reaches
    into it.
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group_head = tl.arange(0, BLOCK_H)
    head, head_mask = row * num_heads + kv_head * GROUP + group_head, group_head < GROUP
    part = tl.arange(0, PARTS)
    known = head_mask[:, None]
    offsets = head[:, None] * PARTS + part[None, :]
    highest = tl.load(highest_ptr + offsets, mask=known, other=float("-inf"))  # [BLOCK_H, PARTS]
    total = tl.load(total_ptr + offsets, mask=known, other=0.0)
    most = tl.max(highest, 1)
    most = tl.where(most == float("-inf"), 0.0, most)
    whole = tl.sum(total * tl.exp(highest - most[:, None]), 1)
    base = most + tl.log(tl.where(whole > 0, whole, 1.0))  # [BLOCK_H]
    length = tl.load(lengths_ptr + row)
    chunks = _chunks(length, room, CHUNK, STRIDE)
    q_main, q_tail = load_heads(q_ptr + head * DIM, head_mask, DIM, MAIN, TAIL, UPCAST)
    keys = k_ptr + row * k_batch_stride + kv_head * k_head_stride
    block = tl.program_id(2) * TILE_N + tl.arange(0, TILE_N)  # [TILE_N]
    chunk = tl.program_id(2) * TILE_N * INSIDE + tl.arange(0, TILE_N * INSIDE)
    shares = _shares(q_main, q_tail, base, head_mask, keys, k_row_stride, chunk, chunk < chunks, scale, DIM, MAIN,
                     TAIL, UPCAST, PRECISION)  # fmt: skip
    largest = tl.max(tl.reshape(shares, [TILE_N, INSIDE]), 1)
    before = block * INSIDE - 1
    live = (before >= 0) & (before < chunks)
    shares = _shares(q_main, q_tail, base, head_mask, keys, k_row_stride, before, live, scale, DIM, MAIN, TAIL, UPCAST,
                     PRECISION)  # fmt: skip
    offset = (row * num_kv_heads + kv_head) * blocks + block
    tl.store(out_ptr + offset, tl.maximum(largest, shares), mask=block < blocks)


def block_scores(
    q: Tensor, compressed: Tensor, lengths: Tensor, *, scale: float, block_tokens: int, out: Tensor
) -> None:
    """Compute `naive.block_scores`."""
    batch, groups, room, _ = compressed.shape
    parts = min(16, triton.next_power_of_2(max(1, _PROGRAMS // (batch * groups))))
    shape = (batch, q.shape[1], parts)
    highest, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    joint, blocks = out.ndim == 2, out.shape[-1]
    own = joint or not out.is_contiguous()
    by_group = torch.empty((batch, groups, blocks), dtype=torch.float32, device=q.device) if own else out
    inside = block_tokens // STRIDE
    tile = max(16, triton.next_power_of_2(max(1, _TILE // inside)))  # blocks of a program
    strides = compressed.stride()
    given = {
        "q_ptr": q, "k_ptr": compressed, "lengths_ptr": lengths, "highest_ptr": highest, "total_ptr": total,
        "scale": scale, "k_batch_stride": strides[0], "k_head_stride": strides[1], "k_row_stride": strides[2],
        "num_heads": q.shape[1], "room": room, "PARTS": parts, "CHUNK": CHUNK, "STRIDE": STRIDE,
        **head_sizes(q, groups, 1 << 16),
    }  # fmt: skip
    _parts_kernel[(batch, groups, parts)](**given, TILE=_TILE)
    _scores_kernel[(batch, groups, triton.cdiv(blocks, tile))](
        **given, out_ptr=by_group, num_kv_heads=groups, blocks=blocks, INSIDE=inside, TILE_N=tile
    )
    if joint:
        torch.sum(by_group, 1, out=out)
    elif own:
        out.copy_(by_group)
