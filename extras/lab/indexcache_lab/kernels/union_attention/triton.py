"""Attention of the queries and heads of a block as the rows of one product, over the union of what they selected."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.heads import arithmetic
from indexcache_lab.kernels.union_attention import ROWS, TILE

if TYPE_CHECKING:
    from indexcache_lab.kernels.union_attention import Unions

_LOWEST = tl.constexpr(-1.0e30)  # below every score, and finite: a row without keys so far needs no branch
_WIDE = 1 << 31  # numbers of a cache whose offsets need 64 bits


@triton.jit
def _union_kernel(
    q_ptr, kv_ptr, keys_ptr, owners_ptr, counts_ptr, out_ptr, scale, room, rows,
    HEADS: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from the OWN rows of one block, pairs of a query and a head; `scale` is to base 2.

    Keys need no mask: behind the count come owners of 0, and a row that exists. The rows of the next tile are known one
    tile ahead, so that copies of keys never wait for them.
    """
    DIM: tl.constexpr = MAIN + TAIL
    block = tl.program_id(0).to(tl.int64)
    row, slot = tl.arange(0, ROWS), tl.arange(0, TILE)
    main, tail = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)
    at = block * OWN + row
    live = ((row < OWN) & (at < rows))[:, None]
    q_main = tl.load(q_ptr + at[:, None] * DIM + main[None, :], mask=live, other=0.0)
    q_tail = tl.load(q_ptr + at[:, None] * DIM + tail[None, :], mask=live, other=0.0)
    if UPCAST:
        q_main, q_tail = q_main.to(tl.float32), q_tail.to(tl.float32)
    count = tl.load(counts_ptr + block)
    keys_ptr += block * room
    owners_ptr += block * room
    query = (row // HEADS)[:, None]
    highest = tl.full((ROWS,), _LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, MAIN), tl.float32)
    end = tl.cdiv(count, TILE) * TILE
    key = tl.load(keys_ptr + slot, mask=slot < end, other=0)
    for first in tl.range(0, count, TILE):
        index = key.to(tl.int64) if WIDE else key
        k_main = tl.load(kv_ptr + index[:, None] * DIM + main[None, :])  # [TILE, MAIN]
        k_tail = tl.load(kv_ptr + index[:, None] * DIM + tail[None, :])  # [TILE, TAIL]
        later = first + TILE + slot
        key = tl.load(keys_ptr + later, mask=later < end, other=0)
        owner = tl.load(owners_ptr + first + slot).to(tl.int32)
        if UPCAST:
            k_main, k_tail = k_main.to(tl.float32), k_tail.to(tl.float32)
        score = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)  # [ROWS, TILE]
        score = tl.dot(q_tail, tl.trans(k_tail), score, input_precision=PRECISION)
        score = tl.where((owner[None, :] >> query) & 1 != 0, score * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        shrink = tl.exp2(highest - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        mean = tl.dot(weight.to(k_main.dtype), k_main, mean * shrink[:, None], input_precision=PRECISION)
        highest = higher
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + at[:, None] * MAIN + main[None, :], mean.to(out_ptr.dtype.element_ty), mask=live)


def union_attention(q: Tensor, kv: Tensor, unions: Unions, scale: float, out: Tensor) -> None:
    """See `indexcache_lab.kernels.union_attention.union_attention`.

    Args:
        q: `[T, H, D]`.
        kv: `[N, D]`.
        unions: of the queries.
        scale: what products are multiplied by.
        out: `[T, H, V]`, written.

    Raises:
        KernelInputError: if a key is not two parts whose sizes are powers of two, the first being the value.
    """
    (heads, dim), main = q.shape[1:], out.shape[2]
    tail = dim - main
    if main < 16 or tail < 16 or main & (main - 1) or tail & (tail - 1):
        raise KernelInputError(f"keys have {dim} dimensions and values {main}, expected powers of two from 16 as parts")
    own = unions.queries * heads
    _union_kernel[(len(unions.counts),)](
        q, kv, unions.keys, unions.owners, unions.counts, out, scale / math.log(2), unions.keys.shape[1],
        q.shape[0] * heads, HEADS=heads, OWN=own, ROWS=min(ROWS, max(16, triton.next_power_of_2(own))), MAIN=main,
        TAIL=tail, TILE=TILE, WIDE=kv.numel() >= _WIDE, num_warps=8, num_stages=2, **arithmetic(q),
    )  # fmt: skip
