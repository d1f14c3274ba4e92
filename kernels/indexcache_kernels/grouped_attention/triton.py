"""The tokens of a block, added to the result over the keys that its queries share: one read, one write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.heads import arithmetic

_LN2 = tl.constexpr(0.6931471805599453)
_PIECE = 64  # dimensions at a time
_ROWS = 32  # queries x heads of a program


@triton.jit
def _add_own_kernel(
    q_ptr, kv_ptr, own_ptr, seen_ptr, shared_ptr, lse_ptr, out_ptr, scale, own_stride, shared_stride, lse_stride,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, TOKENS: tl.constexpr,
    OWN: tl.constexpr, LIMITED: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS pairs of a query and a head of one block."""
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [ROWS], of the block
    live = row < QUERIES * HEADS
    key = tl.arange(0, OWN)  # [OWN]
    token = tl.load(own_ptr + block * own_stride + key, mask=key < TOKENS, other=-1).to(tl.int64)
    there = token >= 0
    at = block * QUERIES * HEADS + row
    score = tl.zeros((ROWS, OWN), tl.float32)
    for first in range(0, DIM, PIECE):
        dim = first + tl.arange(0, PIECE)
        query = tl.load(q_ptr + at[:, None] * DIM + dim[None, :], mask=live[:, None], other=0.0)
        keys = tl.load(kv_ptr + token[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0)
        if UPCAST:
            query, keys = query.to(tl.float32), keys.to(tl.float32)
        score = tl.dot(query, tl.trans(keys), score, input_precision=PRECISION)
    limit = row // HEADS + 1
    if LIMITED:
        limit = tl.load(seen_ptr + block * QUERIES + row // HEADS, mask=live, other=0)
    seen = there[None, :] & (key[None, :] < limit[:, None])
    score = tl.where(seen, score * scale, float("-inf"))
    before = tl.load(lse_ptr + block * lse_stride + row, mask=live, other=float("-inf")) * _LN2  # [ROWS]
    highest = tl.maximum(tl.max(score, 1), before)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(score - highest[:, None])
    rest = tl.exp(before - highest)  # [ROWS]
    total = tl.sum(weight, 1) + rest
    total = tl.where(total == 0.0, 1.0, total)
    weight, rest = weight / total[:, None], rest / total
    for first in range(0, V_DIM, PIECE):
        dim = first + tl.arange(0, PIECE)
        values = tl.load(kv_ptr + token[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0)
        if UPCAST:
            values = values.to(tl.float32)
        found = tl.load(
            shared_ptr + block * shared_stride + row[:, None] * V_DIM + dim[None, :], mask=live[:, None], other=0.0
        ).to(tl.float32)
        found = tl.where(rest[:, None] > 0.0, found * rest[:, None], 0.0)  # what nobody selected may be NaN
        found = tl.dot(weight.to(values.dtype), values, found, input_precision=PRECISION)
        out_ptrs = out_ptr + at[:, None] * V_DIM + dim[None, :]
        tl.store(out_ptrs, found.to(out_ptr.dtype.element_ty), mask=live[:, None])


def add_own(
    q: Tensor,
    kv: Tensor,
    own: Tensor,
    shared: Tensor,
    lse: Tensor,
    scale: float,
    out: Tensor,
    seen: Tensor | None = None,
) -> None:
    """See `naive.add_own`.

    Raises:
        KernelInputError: if dimensions are no multiples of 64.
    """
    blocks, tokens = own.shape
    queries, (heads, v_dim) = len(out) // blocks, out.shape[1:]
    if q.shape[2] % _PIECE or v_dim % _PIECE:
        raise KernelInputError(f"q has {q.shape[2]} dimensions and values {v_dim}, expected multiples of {_PIECE}")
    _add_own_kernel[(blocks, triton.cdiv(queries * heads, _ROWS))](
        q, kv, own, seen, shared, lse, out, scale, own.stride(0), shared.stride(0), lse.stride(0),
        QUERIES=queries, HEADS=heads, DIM=q.shape[2], V_DIM=v_dim, TOKENS=tokens,
        OWN=max(16, triton.next_power_of_2(tokens)), LIMITED=seen is not None, ROWS=_ROWS, PIECE=_PIECE,
        num_warps=4, **arithmetic(q),
    )  # fmt: skip
