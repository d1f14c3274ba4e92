"""Attention of one decode step over chosen blocks of the cache."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from indexcache_kernels.block_attention import naive
from indexcache_kernels.errors import KernelInputError, expect

DTYPES = (torch.float32, torch.bfloat16)
BlockBackend = Literal["auto", "naive", "cpu"]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    scale: float,
    block_tokens: int,
    lengths: Tensor,
    backend: BlockBackend = "auto",
) -> Tensor:
    """Softmax attention of the newest token over the tokens of chosen blocks; all heads have one choice.

    Args:
        q: `[B, H, D]`: float32 or bfloat16.
        k: `[B, G, L, D]`, in the dtype of `q`; head h uses key head h // (H / G). May be a part of a longer buffer.
        v: `[B, G, L, V]`, likewise.
        blocks: `[B, N]`, int32: block u has the tokens u x block_tokens and on, up to the request's length; -1 for
            none. A block that stands there twice counts twice.
        scale: what products of `q` and `k` are multiplied by.
        block_tokens: tokens of a block.
        lengths: `[B]`, int32: tokens in the cache, the newest one included.
        backend: `naive` is PyTorch; `cpu` is C++ (AVX2 or AVX-512, PyTorch's threads), compiled when it is first
            called; `auto` takes that where tensors are on the CPU and it can be compiled.

    Returns:
        `[B, H, V]`, in the dtype of `q`; zeros for a request without a block. Sums are in float32.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, a block lies behind a request's tokens, or
            `cpu` can't be compiled or run.
    """
    _check(q, k, v, blocks, block_tokens, lengths)
    if backend == "naive":
        return naive.block_attention(q, k, v, blocks, scale=scale, block_tokens=block_tokens, lengths=lengths)
    from indexcache_kernels.block_attention import cpu

    reason = cpu.missing(q, v)
    if reason is None:
        return cpu.block_attention(q, k, v, blocks, scale=scale, block_tokens=block_tokens, lengths=lengths)
    if backend == "cpu":
        raise KernelInputError(f"backend cpu {reason}; expected naive")
    return naive.block_attention(q, k, v, blocks, scale=scale, block_tokens=block_tokens, lengths=lengths)


def _check(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block_tokens: int, lengths: Tensor) -> None:
    if q.ndim != 3 or k.ndim != 4 or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise KernelInputError(f"q is {list(q.shape)} and k {list(k.shape)}, expected [B, H, D] and [B, G, L, D]")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise KernelInputError(f"v is {list(v.shape)}, expected {list(k.shape[:3])} and the dimensions of a value")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise KernelInputError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, expected the same one of {DTYPES}")
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise KernelInputError("k and v have dimensions that do not lie side by side")
    if blocks.ndim != 2 or blocks.shape[0] != len(q) or blocks.dtype != torch.int32:
        raise KernelInputError(
            f"blocks is {list(blocks.shape)} of {blocks.dtype}, expected [{len(q)}, N] of torch.int32"
        )
    if block_tokens < 1:
        raise KernelInputError(f"block_tokens is {block_tokens}, expected at least 1")
    expect("lengths", lengths, (len(q),), torch.int32)
    if not len({item.device for item in (q, k, v, blocks, lengths)}) == 1:
        raise KernelInputError("tensors are on different devices")
