"""Heads of any size as two parts whose sizes are powers of two: shared by the kernels over attention heads."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_heads(row_ptrs, row_mask, DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr):
    """Load both parts of the heads that `row_ptrs` point to, `[n, MAIN]` and `[n, TAIL]`; 0 where they don't exist."""
    main, tail = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)  # [MAIN], [TAIL]
    first = tl.load(row_ptrs[:, None] + main[None, :], mask=row_mask[:, None] & (main < DIM)[None, :], other=0.0)
    second = tl.load(row_ptrs[:, None] + tail[None, :], mask=row_mask[:, None] & (tail < DIM)[None, :], other=0.0)
    if UPCAST:
        first, second = first.to(tl.float32), second.to(tl.float32)
    return first, second


@triton.jit
def load_rows(row_ptrs, row_mask, DIM: tl.constexpr, PADDED: tl.constexpr, UPCAST: tl.constexpr):
    """Load the vectors that `row_ptrs` point to, `[n, PADDED]`; 0 where they don't exist."""
    dim = tl.arange(0, PADDED)
    vectors = tl.load(row_ptrs[:, None] + dim[None, :], mask=row_mask[:, None] & (dim < DIM)[None, :], other=0.0)
    if UPCAST:
        vectors = vectors.to(tl.float32)
    return vectors


@triton.jit
def products(q_main, q_tail, k_main, k_tail, scale, PRECISION: tl.constexpr):
    """Multiply all queries with all keys, scaled."""
    score = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)  # [BLOCK_H, BLOCK_K]
    return tl.dot(q_tail, tl.trans(k_tail), score, input_precision=PRECISION) * scale


def head_sizes(q: Tensor, kv_heads: int, block_h: int) -> dict[str, Any]:
    """Split the heads of `q`, `[T, H, D]`: D into MAIN + TAIL, powers of two, and the heads of a key head."""
    heads, dim = q.shape[1:]
    main = max(16, 1 << (dim.bit_length() - 1))
    return {
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "MAIN": main,
        "TAIL": max(16, triton.next_power_of_2(max(0, dim - main))),
        "BLOCK_H": min(block_h, max(16, triton.next_power_of_2(heads // kv_heads))),
        **arithmetic(q),
    }


def arithmetic(q: Tensor) -> dict[str, Any]:
    """Return how products with `q` are computed."""
    return {
        "UPCAST": q.dtype == torch.bfloat16 and not q.is_cuda,  # Triton's interpreter multiplies the bits
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
