"""Attention of each query over the keys that were selected for it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.sparse_attention import naive


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, backend: Literal["auto", "naive", "triton"] = "auto"
) -> tuple[Tensor, Tensor]:
    """Softmax attention over gathered keys, with gradients of `q`, `k` and `v`.

    Absorbed MLA: `k` is `[S, 1, 576]`, latent and rotary part, and `v` the view `k[..., :512]`; it is then read once.

    Args:
        q: `[T, H, D]`: float32, bfloat16 or float16.
        k: `[S, G, D]`, in the dtype of `q`; heads h of `q` use key head h // (H / G).
        v: `[S, G, V]`.
        indices: `[T, K]`, int32: rows of `k`, in any order, -1 for none; the same for all heads.
        scale: of the products, before the softmax.
        backend: `naive` is PyTorch with gathered copies, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto`
            takes that on CUDA.

    Returns:
        `[T, H, V]` in the dtype of `q`, 0 where a query has no key, and the logarithm of the softmax's denominator,
        `[T, H]`, float32, -inf there; the second has no gradient.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2]:
        shapes = ", ".join(f"{name} {list(item.shape)}" for name, item in (("q", q), ("k", k), ("v", v)))
        raise KernelInputError(f"found {shapes}, expected [T, H, D], [S, G, D] and [S, G, V]")
    if q.shape[1] % k.shape[1]:
        raise KernelInputError(f"q has {q.shape[1]} heads, expected a multiple of the {k.shape[1]} of k")
    if not q.dtype == k.dtype == v.dtype:
        raise KernelInputError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, expected one dtype")
    if indices.ndim != 2 or len(indices) != len(q) or indices.dtype != torch.int32:
        raise KernelInputError(
            f"indices is {list(indices.shape)} of {indices.dtype}, expected [{len(q)}, K] of torch.int32"
        )
    if backend == "naive" or (backend == "auto" and not q.is_cuda):
        return naive.sparse_attention(q, k, v, indices, scale)
    from indexcache_kernels.sparse_attention.triton import SparseAttention

    k, v = (item if item.stride(2) == 1 else item.contiguous() for item in (k, v))
    out, lse = SparseAttention.apply(q.contiguous(), k, v, indices.contiguous(), scale)  # type: ignore[no-untyped-call]
    return out, lse
