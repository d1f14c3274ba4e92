"""Scores of blocks of the cache for the newest token, by compressed keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from indexcache_kernels.backends import runs_triton
from indexcache_kernels.errors import KernelInputError, expect, expect_one_device, share_evenly
from indexcache_lab.kernels.block_scores import naive
from indexcache_lab.kernels.block_scores.naive import CHUNK, STRIDE, compress_keys

__all__ = ["block_scores", "compress_keys"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def block_scores(
    q: Tensor,
    compressed: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    block_tokens: int,
    heads: Literal["joint", "key"] = "joint",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Score blocks by the attention shares of compressed keys.

    Shares are summed over the heads of a key head; a block gets the largest share that touches it. A compressed key
    that a request does not see to its end has no share. Shapes are static, and results repeat bit for bit.

    Args:
        q: `[B, H, D]`, the newest token of each request: float32, bfloat16 or float16.
        compressed: `[B, G, C, D]`, see `compress_keys`, in the dtype of `q`; head h uses key head h // (H / G). May be
            a part of a longer buffer.
        lengths: `[B]`, int32: tokens in the cache, the newest one included.
        scale: what products are multiplied by.
        block_tokens: tokens of a block, 16 times a power of two.
        heads: `joint`: scores are summed over key heads; `key`: each key head has its own.
        out: `[B, N]`, or with `key` `[B, G, N]`, float32, to write into; N is the number of blocks that C compressed
            keys can be of.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes it on CUDA.

    Returns:
        `out`; zeros behind a request's last block.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together.
    """
    if q.ndim != 3 or compressed.ndim != 4 or len(compressed) != len(q) or compressed.shape[3] != q.shape[2]:
        raise KernelInputError(
            f"q is {list(q.shape)} and compressed {list(compressed.shape)}, expected [B, H, D] and [B, G, C, D]"
        )
    if not share_evenly(q.shape[1], compressed.shape[1]) or not q.shape[2]:
        raise KernelInputError(
            f"q has {q.shape[1]} heads of {q.shape[2]} dimensions, expected some, and a multiple of the"
            f" {compressed.shape[1]} of keys"
        )
    if q.dtype != compressed.dtype or q.dtype not in DTYPES:
        raise KernelInputError(f"q is {q.dtype} and compressed {compressed.dtype}, expected the same one of {DTYPES}")
    inside = block_tokens // STRIDE
    if block_tokens < STRIDE or block_tokens % STRIDE or inside & (inside - 1):
        raise KernelInputError(f"block_tokens is {block_tokens}, expected {STRIDE} times a power of two")
    if heads not in ("joint", "key"):
        raise KernelInputError(f"heads is {heads!r}, expected joint or key")
    expect("lengths", lengths, (len(q),), torch.int32)
    rows = (len(q),) if heads == "joint" else (len(q), compressed.shape[1])
    shape = (*rows, -(-(compressed.shape[2] * STRIDE + CHUNK - 1) // block_tokens))
    if out is None:
        out = torch.zeros(shape, dtype=torch.float32, device=q.device)
    expect("out", out, shape, torch.float32)
    expect_one_device(q, compressed, lengths, out)
    if runs_triton(backend, q):
        from indexcache_lab.kernels.block_scores.triton import block_scores as by_triton

        if compressed.stride(3) != 1:
            compressed = compressed.contiguous()
        by_triton(q.contiguous(), compressed, lengths, scale=scale, block_tokens=block_tokens, out=out)
    else:
        out.zero_()
        naive.block_scores(q, compressed, lengths, scale=scale, block_tokens=block_tokens, out=out)
    return out
