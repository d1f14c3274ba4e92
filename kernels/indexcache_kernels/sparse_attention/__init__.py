"""Attention of each query over the keys that were selected for it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, share_evenly
from indexcache_kernels.sparse_attention import flash_mla, naive

AttentionBackend = Backend | Literal["flash_mla"]


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    indices: Tensor,
    scale: float,
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend to gathered keys with a softmax; the kernels have no gradients, `naive` has PyTorch's.

    Args:
        q: `[T, H, D]`: float32, bfloat16 or float16.
        k: `[L, G, D]`, in the dtype of `q`; heads h of `q` use key head h // (H / G).
        v: `[L, G, V]`; or V, where the first V dimensions of a key are its value, as in absorbed MLA (D 576, V 512).
        indices: `[T, K]`, int32: rows of `k`, in any order, -1 for none; the same for all heads.
        scale: what products are multiplied by, before the softmax.
        backend: `naive` is PyTorch with dense scores, `triton` needs a CUDA device or TRITON_INTERPRET=1,
            `flash_mla` sgl_kernel, and is for absorbed MLA in bfloat16 on Hopper. `auto` takes the first that fits of
            the last, `triton` on CUDA, and `naive`.

    Returns:
        `[T, H, V]` in the dtype of `q`, 0 where a query has no key, and the logarithm of the softmax's denominator,
        `[T, H]`, float32, -inf there; the second has no gradient.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together, the backend can't run them, or a kernel is to give
            gradients.
    """
    values = check_inputs(q, k, v, indices)
    runs = implementation(q, k, v, backend)
    if runs == "naive":
        return naive.sparse_attention(q, k, values, indices, scale)
    if torch.is_grad_enabled() and any(item.requires_grad for item in (q, k, values)):
        raise KernelInputError(
            f"q, k or v needs a gradient, and {runs} has none here; expected torch.no_grad(), backend naive, or"
            " sparse_attention with gradients (docs/reference/kernels.md)"
        )
    from indexcache_kernels.sparse_attention.triton import attend, finish

    k, in_own = laid_out(q, k, v)
    if runs == "triton":
        return attend(q.contiguous(), k, in_own, values.shape[2], indices.contiguous(), scale)
    out, lse = flash_mla.forward(q.contiguous(), k, indices.contiguous(), scale)
    finish(out, lse, indices.contiguous())
    return out, lse


def check_inputs(q: Tensor, k: Tensor, v: Tensor | int, indices: Tensor) -> Tensor:
    """Check inputs of `sparse_attention`, and return the values, `[L, G, V]`.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    if q.ndim != 3 or k.ndim != 3 or q.shape[2] != k.shape[2]:
        raise KernelInputError(f"q is {list(q.shape)} and k {list(k.shape)}, expected [T, H, D] and [L, G, D]")
    if isinstance(v, int) and not 1 <= v <= k.shape[2]:
        raise KernelInputError(f"v is {v}, expected 1 to the {k.shape[2]} dimensions of k")
    if isinstance(v, Tensor) and (v.ndim != 3 or v.shape[:2] != k.shape[:2]):
        raise KernelInputError(f"v is {list(v.shape)}, expected {list(k.shape[:2])} and its own dimension")
    if not share_evenly(q.shape[1], k.shape[1]):
        raise KernelInputError(f"q has {q.shape[1]} heads, expected a multiple of the {k.shape[1]} of k")
    values = k[..., :v] if isinstance(v, int) else v
    if not q.dtype == k.dtype == values.dtype:
        raise KernelInputError(f"q is {q.dtype}, k {k.dtype} and v {values.dtype}, expected one dtype")
    if indices.ndim != 2 or len(indices) != len(q) or indices.dtype != torch.int32:
        raise KernelInputError(
            f"indices is {list(indices.shape)} of {indices.dtype}, expected [{len(q)}, K] of torch.int32"
        )
    return values


def implementation(
    q: Tensor, k: Tensor, v: Tensor | int, backend: AttentionBackend
) -> Literal["naive", "triton", "flash_mla"]:
    """Return what runs with inputs that fit together.

    Raises:
        KernelInputError: if the backend can't run them.
    """
    if backend in ("auto", "flash_mla") and flash_mla.fits(q, k, v):
        return "flash_mla"
    if backend == "flash_mla":
        raise KernelInputError("flash_mla can't run this, see indexcache_kernels.sparse_attention.flash_mla.fits")
    return "triton" if runs_triton(backend, q) else "naive"


def laid_out(q: Tensor, k: Tensor, v: Tensor | int) -> tuple[Tensor, Tensor | None]:
    """Return keys and values as kernels read them; no values where they read each key once, for both."""
    values = k[..., :v] if isinstance(v, int) else v
    k, values = (item if item.stride(2) == 1 else item.contiguous() for item in (k, values))
    in_keys = isinstance(v, int) and v == 1 << (q.shape[2].bit_length() - 1) and v >= 16
    return k, None if in_keys else values
