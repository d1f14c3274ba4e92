"""Attention over chosen blocks of the cache: of decode steps, and with gradients of whole sequences."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from indexcache_kernels.backends import runs_triton
from indexcache_kernels.errors import KernelInputError, expect, expect_one_device, share_evenly
from indexcache_lab.kernels.block_attention import naive

DTYPES = (torch.float32, torch.bfloat16)
BlockBackend = Literal["auto", "naive", "cpu", "triton"]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    scale: float,
    block_tokens: int,
    lengths: Tensor,
    bias: Tensor | None = None,
    backend: BlockBackend = "auto",
) -> Tensor:
    """Attend from each query to the tokens of its blocks, with a softmax.

    All heads of a query have the same blocks, or those of each key head have their own.

    Gradients of `k`, `v` and `bias` are sums in no fixed order on a CUDA device.

    Args:
        q: `[B, H, D]`, the newest token of each request, or `[B, T, H, D]`: float32 or bfloat16.
        k: `[B, G, L, D]`, in the dtype of `q`; head h uses key head h // (H / G). May be a part of a longer buffer.
        v: `[B, G, L, V]`, likewise.
        blocks: `[B, N]` or `[B, T, N]`, int32, or `[B, G, N]` or `[B, T, G, N]` for the heads of each key head: block u
            has the tokens u x block_tokens and on, of those that the query sees; -1 for none. A block that stands there
            twice counts twice.
        scale: what products of `q` and `k` are multiplied by.
        block_tokens: tokens of a block.
        lengths: `[B]` or `[B, T]`, int32: tokens that a query sees, the first ones of the cache.
        bias: `[B, G, L]`, float32: what is added to the scaled products of each token, before the softmax.
        backend: `naive` is PyTorch; `cpu` is C++ (AVX2 or AVX-512, PyTorch's threads), compiled when it is first
            called, of `[B, H, D]` without bias and gradients; `triton` needs a CUDA device or TRITON_INTERPRET=1.
            `auto` takes the last on CUDA, `cpu` where that can be had, and `naive`.

    Returns:
        As `q`, with V dimensions; zeros for a query without a block. Sums are in float32.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them; of tensors on
            a CPU also if a block lies behind what its query sees.
    """
    _check(q, k, v, blocks, block_tokens, lengths, bias)
    single = q.ndim == 3
    if single:
        q, blocks, lengths = (item.unsqueeze(1) for item in (q, blocks, lengths))
    if backend in ("auto", "cpu"):
        from indexcache_lab.kernels.block_attention import cpu

        reason = cpu.missing(q, k, v, bias)
        if reason is None:
            one = (q[:, 0], k, v, blocks[:, 0])
            found = cpu.block_attention(*one, scale=scale, block_tokens=block_tokens, lengths=lengths[:, 0])
            return found if single else found[:, None]
        if backend == "cpu":
            raise KernelInputError(f"backend cpu {reason}; expected naive")
    if runs_triton(backend, q):
        from indexcache_lab.kernels.block_attention.triton import BlockAttention

        contiguous = (item.contiguous() for item in (blocks, lengths))
        given = None if bias is None else bias.contiguous()
        out: Tensor = BlockAttention.apply(q.contiguous(), k, v, given, *contiguous, scale, block_tokens)  # type: ignore[no-untyped-call]
    else:
        out = naive.block_attention(q, k, v, blocks, scale=scale, block_tokens=block_tokens, lengths=lengths, bias=bias)
    return out[:, 0] if single else out


def _check(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block_tokens: int, lengths: Tensor, bias: Tensor | None
) -> None:
    if q.ndim not in (3, 4) or k.ndim != 4 or len(k) != len(q) or k.shape[3] != q.shape[-1]:
        raise KernelInputError(f"q is {list(q.shape)} and k {list(k.shape)}, expected [B, H, D] and [B, G, L, D]")
    if not share_evenly(q.shape[-2], k.shape[1]) or not q.shape[-1]:
        raise KernelInputError(
            f"q is {list(q.shape)} and k {list(k.shape)}, expected D and heads, H of q a multiple of G of k"
        )
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise KernelInputError(f"v is {list(v.shape)}, expected {list(k.shape[:3])} and the dimensions of a value")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise KernelInputError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, expected the same one of {DTYPES}")
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise KernelInputError("k and v have dimensions that do not lie side by side")
    axes = tuple(q.shape[:-2])
    if tuple(blocks.shape[:-1]) not in (axes, (*axes, k.shape[1])) or blocks.dtype != torch.int32:
        joint = ", ".join(map(str, axes))
        expected = f"[{joint}, N] or [{joint}, {k.shape[1]}, N] of torch.int32"
        raise KernelInputError(f"blocks is {list(blocks.shape)} of {blocks.dtype}, expected {expected}")
    if block_tokens < 1:
        raise KernelInputError(f"block_tokens is {block_tokens}, expected at least 1")
    expect("lengths", lengths, axes, torch.int32)
    if bias is not None:
        expect("bias", bias, tuple(k.shape[:3]), torch.float32)
    expect_one_device(q, k, v, blocks, lengths, bias)
