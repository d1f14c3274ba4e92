"""Sparse attention with gradients: forward as `indexcache_kernels.sparse_attention`, backward by kernels here."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_kernels import sparse_attention as without_gradients
from indexcache_kernels.sparse_attention import AttentionBackend, check_inputs, implementation, laid_out
from indexcache_train.kernels.attention_gradients import hopper


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    indices: Tensor,
    scale: float,
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend as `indexcache_kernels.sparse_attention`, with gradients of `q`, `k` and `v` on every backend.

    Gradients of `k` and `v` are sums in no fixed order on a CUDA device, so they differ in the last bits between runs.

    Args:
        q: `[T, H, D]`, see there; so are the others.
        k: `[L, G, D]`.
        v: `[L, G, V]`, or V.
        indices: `[T, K]`, int32.
        scale: what products are multiplied by, before the softmax.
        backend: `naive` and `triton` have gradients of their own; the others take `hopper`'s where `hopper.fits`, else
            Triton's.

    Returns:
        As there: `[T, H, V]`, and `[T, H]`, float32, which has no gradient.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together, or the backend can't run them.
    """
    values = check_inputs(q, k, v, indices)
    trained = torch.is_grad_enabled() and any(item.requires_grad for item in (q, k, values))
    if not trained or implementation(q, k, v, backend) == "naive":
        return without_gradients(q, k, v, indices, scale, backend)
    from indexcache_train.kernels.attention_gradients.triton import SparseAttention

    by_hopper = backend != "triton" and hopper.fits(q, k, v)
    k, in_own = laid_out(q, k, v)
    out, lse = SparseAttention.apply(  # type: ignore[no-untyped-call]
        q.contiguous(), k, in_own, values.shape[2], indices.contiguous(), scale, backend, by_hopper
    )
    return out, lse
