"""The steps of selecting for blocks, each a kernel with a program for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from indexcache_kernels.prompt_blocks import IndexSpace

_PIECE = 1024  # elements of a query at a time


@triton.jit
def _mean_kernel(
    q_ptr, gates_ptr, first_ptr, sizes_ptr, mean_ptr, mean_gates_ptr, q_stride, gates_stride, share, ranks,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Take the mean of a piece of a row's queries; the first piece's program also takes that of the gates."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, size = tl.load(first_ptr + row).to(tl.int64), tl.load(sizes_ptr + row)
    at = piece * PIECE + tl.arange(0, PIECE)
    live = at < WIDTH
    total = tl.zeros((PIECE,), tl.float32)
    for number in range(size):
        place = (first + number) % ranks * share + (first + number) // ranks
        total += tl.load(q_ptr + place * q_stride + at, mask=live, other=0.0).to(tl.float32)
    tl.store(mean_ptr + row * WIDTH + at, (total / size).to(mean_ptr.dtype.element_ty), mask=live)
    if piece == 0:
        head = tl.arange(0, PADDED)
        total_gates = tl.zeros((PADDED,), tl.float32)
        for number in range(size):
            place = (first + number) % ranks * share + (first + number) // ranks
            total_gates += tl.load(gates_ptr + place * gates_stride + head, mask=head < HEADS, other=0.0)
        tl.store(mean_gates_ptr + row * HEADS + head, total_gates / size, mask=head < HEADS)


@triton.jit
def _lowest_kernel(
    scores_ptr, chosen_ptr, starts_ptr, counts_ptr, out_ptr, scores_stride, chosen_stride,
    TOPK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Move the lowest of one row to its end."""
    row = tl.program_id(0).to(tl.int64)
    start, count = tl.load(starts_ptr + row), tl.load(counts_ptr + row)
    at = tl.arange(0, PADDED)
    exists = at < TOPK
    key = tl.load(chosen_ptr + row * chosen_stride + at, mask=exists, other=-1)
    score = tl.load(scores_ptr + row * scores_stride + start + key, mask=key >= 0, other=float("-inf"))
    score = tl.where(exists, score, float("inf"))
    moved = tl.zeros((PADDED,), tl.int32)
    for _ in range(count):
        left = tl.where(moved == 0, score, float("inf"))
        lowest = tl.min(left, 0)
        last = tl.max(tl.where((left == lowest) & (moved == 0) & exists, at, -1), 0)
        moved = tl.where(at == last, 1, moved)
    place = tl.cumsum(1 - moved, 0) - 1
    place = tl.where(moved == 1, TOPK - count + tl.cumsum(moved, 0) - 1, place)
    tl.store(out_ptr + row * TOPK + place, key, mask=exists)


@triton.jit
def _expand_kernel(
    chosen_ptr, first_ptr, sizes_ptr, begins_ptr, offsets_ptr, pages_ptr, requests_ptr, result_ptr, pages_stride,
    page_size, rank, ranks, TOPK: tl.constexpr, PADDED: tl.constexpr, RAGGED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write what the queries of one row attend to, of those that are on this rank."""
    row = tl.program_id(0).to(tl.int64)
    first, size = tl.load(first_ptr + row).to(tl.int64), tl.load(sizes_ptr + row)
    at = tl.arange(0, PADDED)
    own = at - (TOPK - tl.where(size > 1, size, 0))  # number of a token in its block
    position = tl.load(chosen_ptr + row * TOPK + at, mask=(at < TOPK) & (own < 0), other=-1)
    position = tl.where(own >= 0, tl.load(begins_ptr + row) + own, position)
    index = position
    if RAGGED:
        index = position + tl.load(offsets_ptr + row)
    if PAGED:
        pages = pages_ptr + tl.load(requests_ptr + row).to(tl.int64) * pages_stride
        page = tl.load(pages + position // page_size, mask=(position >= 0) & (at < TOPK), other=0)
        index = page * page_size + position % page_size
    index = tl.where(position < 0, -1, index)
    skipped = ((rank + ranks - first % ranks) % ranks).to(tl.int32)
    for number in range(skipped, size, ranks):
        seen = tl.where(own > number, -1, index)
        tl.store(result_ptr + (first + number) // ranks * TOPK + at, seen, mask=at < TOPK)


def mean_queries(q: Tensor, gates: Tensor, first: Tensor, sizes: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """See `indexcache_kernels.prompt_blocks.mean_queries`."""
    heads, width = q.shape[1], q.shape[1] * q.shape[2]
    mean = torch.empty((len(first), *q.shape[1:]), dtype=q.dtype, device=q.device)
    mean_gates = torch.empty((len(first), heads, 1), dtype=torch.float32, device=q.device)
    if len(first):
        _mean_kernel[(len(first), triton.cdiv(width, _PIECE))](
            q, gates, first, sizes, mean, mean_gates, q.stride(0), gates.stride(0), len(q) // ranks, ranks,
            HEADS=heads, WIDTH=width, PIECE=_PIECE, PADDED=triton.next_power_of_2(heads), num_warps=4,
        )  # fmt: skip
    return mean, mean_gates


def lowest_last(scores: Tensor, chosen: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """See `indexcache_kernels.prompt_blocks.lowest_last`."""
    out, topk = torch.empty(chosen.shape, dtype=torch.int32, device=chosen.device), chosen.shape[1]
    if len(out):
        _lowest_kernel[(len(out),)](
            scores, chosen, starts, counts, out, scores.stride(0), chosen.stride(0),
            TOPK=topk, PADDED=triton.next_power_of_2(topk), num_warps=4,
        )  # fmt: skip
    return out


def expand_blocks(
    chosen: Tensor,
    first: Tensor,
    sizes: Tensor,
    begins: Tensor,
    space: IndexSpace,
    result: Tensor,
    *,
    rank: int,
    ranks: int,
) -> None:
    """See `indexcache_kernels.prompt_blocks.expand_blocks`."""
    topk = chosen.shape[1]
    if len(chosen):
        _expand_kernel[(len(chosen),)](
            chosen, first, sizes, begins, space.offsets, space.pages, space.requests, result,
            0 if space.pages is None else space.pages.stride(0), space.page_size, rank, ranks,
            TOPK=topk, PADDED=triton.next_power_of_2(topk),
            RAGGED=space.offsets is not None, PAGED=space.offsets is None and space.pages is not None, num_warps=4,
        )  # fmt: skip
