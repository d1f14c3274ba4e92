"""Gradients by a kernel written for Hopper, where it runs and is faster than the one for all devices.

Gluon, the language it is in, is an experimental part of Triton and may change with any release; so releases are listed,
and others take the Triton kernel.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

DIM, V_DIM, HEADS, CHUNK = 576, 512, 64, 128
FEWER_HEADS = 32  # what one program of the Triton kernel takes; up to these it is as fast or faster
# Run with 3.6. With 3.5, 3.7 and 3.8 the same copies, products, waits, fences and barriers come out in the same order;
# 3.9 has another order, which nobody has run.
FIRST_TRITON, AFTER_LAST_TRITON = (3, 5), (3, 9)


@cache
def _kernel() -> Any:
    """Import the kernel; None where Triton is missing or another release, or interprets."""
    try:
        import triton

        release = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if os.environ.get("TRITON_INTERPRET") == "1" or not FIRST_TRITON <= release < AFTER_LAST_TRITON:
            return None
        from indexcache_train.kernels.attention_gradients.hopper_kernel import backward_kernel
    except (ImportError, AttributeError, ValueError):
        return None
    return backward_kernel


def fits(q: Tensor, k: Tensor, v: Tensor | int) -> bool:
    """Return whether the gradients of `sparse_attention` with these inputs are computed here.

    On a Hopper device (NVIDIA, capability 9.0: its 227 KB of shared memory take the 224 that the kernel needs), for
    absorbed MLA in bfloat16 with more than 32 heads, with Triton 3.5 to 3.8.
    """
    if not q.is_cuda or torch.version.hip or torch.cuda.get_device_capability(q.device) != (9, 0):
        return False
    shape = isinstance(v, int) and (v, q.shape[2], k.shape[1]) == (V_DIM, DIM, 1) and len(k) > 0
    return shape and q.shape[1] > FEWER_HEADS and q.dtype == torch.bfloat16 and _kernel() is not None


def gradients(
    q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, delta: Tensor, d_out: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `q` and `k`, in bfloat16; those of `k` are sums in no fixed order.

    Args:
        q: `[T, H, 576]`, bfloat16, contiguous.
        k: `[L, 1, 576]`, bfloat16, whose first 512 dimensions are the values.
        indices: `[T, K]`, int32, contiguous: rows of `k`, -1 for none.
        lse: `[T, H]`, float32: natural logarithm of the softmax's denominator, -inf where a query has no key.
        delta: `[T, H]`, float32: out . d_out.
        d_out: `[T, H, 512]`, bfloat16, contiguous: gradient of the result.
        scale: what products were multiplied by, before the softmax.
    """
    if k.stride(0) % 16 or k.data_ptr() % 16:  # rows are copied 16 bytes at a time
        k = k.clone(memory_format=torch.contiguous_format)
    d_q, d_k = torch.empty_like(q), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    sums = torch.zeros((len(k), DIM), dtype=torch.float32, device=k.device)
    _kernel()[(len(q), -(-q.shape[1] // HEADS))](
        q, k, indices, lse, delta, d_out, d_q, sums, scale, k.stride(0), q.shape[1], TOPK=indices.shape[1], MAIN=V_DIM,
        TAIL=DIM - V_DIM, BLOCK_H=HEADS, BLOCK_K=64, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    restore(sums, d_k)
    return d_q, d_k


def restore(sums: Tensor, d_k: Tensor) -> None:
    """Write the kernel's `sums`, `[L, 576]`, to `d_k` in the order of dimensions; see `hopper_kernel._add`."""
    d_k.view(len(sums), -1, 2, 4, 2).copy_(sums.view(len(sums), -1, 4, 2, 2).transpose(2, 3))
