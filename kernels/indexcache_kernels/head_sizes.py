"""Compile-time sizes that kernels over attention heads have in common."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor


def head_sizes(q: Tensor, kv_heads: int, block_h: int) -> dict[str, Any]:
    """How heads of `q`, `[T, H, D]`, are split: D into MAIN + TAIL, powers of two, and the heads of a key head."""
    heads, dim = q.shape[1:]
    main = max(16, 1 << (dim.bit_length() - 1))
    return {
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "MAIN": main,
        "TAIL": max(16, triton.next_power_of_2(max(0, dim - main))),
        "BLOCK_H": min(block_h, max(16, triton.next_power_of_2(heads // kv_heads))),
        "UPCAST": q.dtype == torch.bfloat16 and not q.is_cuda,  # Triton's interpreter multiplies the bits
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
