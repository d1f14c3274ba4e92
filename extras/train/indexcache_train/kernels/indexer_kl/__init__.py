"""The loss that trains an indexer: how far its scores are from where the attention looks."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect, share_evenly
from indexcache_train.kernels.indexer_kl import naive


def indexer_kl(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    scale: float,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    indices: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute KL(mean over heads of the attention || softmax of the index scores), with gradients to the indexer.

    Over all keys of a query (warm-up), or over those selected for it (sparse stage): IndexCache, Sections 2.1, 3.2.

    Args:
        q: `[T, H, D]`, of the attention: float32, bfloat16 or float16, on `naive` also float64; no gradient.
        k: `[L, G, D]`, in the dtype of `q`; heads h of `q` use key head h // (H / G).
        lse: `[T, H]`, float32: logarithm of the attention's denominator over the same keys, see `sparse_attention`.
            `naive` computes its own, and takes None.
        scale: what products of `q` and `k` are multiplied by.
        index_q: `[T, I, C]`, in the dtype of `q`.
        index_k: `[L, C]`, in the dtype of `q`.
        index_weights: `[T, I]`, float32, or float64 like `q`.
        starts: `[T]`, int32, the first key that a query sees; see `causal_ranges`. Not looked at with `indices`.
        ends: `[T]`, int32, one past the last.
        indices: `[T, K]`, int32: what was selected, -1 for none; None for all keys that a query sees.
        backend: `naive` is PyTorch with dense scores, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes
            that on CUDA.

    Returns:
        The sum over queries, with gradients, and each query's, `[T]`, without; float32, in nats, 0 where a query has
        no key. Gradients are computed with the sum, if any input needs one, and kept until the backward pass.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    queries, keys = len(q), len(k)
    if q.ndim != 3 or k.ndim != 3 or q.shape[2] != k.shape[2] or not share_evenly(q.shape[1], k.shape[1]):
        raise KernelInputError(
            f"q is {list(q.shape)} and k {list(k.shape)}, expected [T, H, D] and [L, G, D], H a multiple of G"
        )
    heads, dim = index_q.shape[1:] if index_q.ndim == 3 else (0, 0)
    if lse is not None:
        expect("lse", lse, (queries, q.shape[1]), torch.float32)
    expect("index_q", index_q, (queries, heads, dim), q.dtype)
    expect("index_k", index_k, (keys, dim), q.dtype)
    expect("index_weights", index_weights, (queries, heads), torch.promote_types(q.dtype, torch.float32))
    if indices is not None:
        expect("indices", indices, (queries, indices.shape[-1]), torch.int32)
    elif starts is None or ends is None:
        raise KernelInputError("neither indices nor starts and ends are given, expected one of them")
    else:
        expect("starts", starts, (queries,), torch.int32)
        expect("ends", ends, (queries,), torch.int32)
    if not runs_triton(backend, q):
        visible = visible_keys(keys, starts, ends, indices)
        losses = naive.indexer_kl(q, k, scale, index_q, index_k, index_weights, visible)
        return losses.sum(), losses.detach()
    if lse is None:
        raise KernelInputError("lse is None, expected it where the kernel runs")
    from indexcache_train.kernels.indexer_kl.triton import IndexerKL

    detached = [item.detach().contiguous() for item in (q, k, lse)]
    trained = [item.contiguous() for item in (index_q, index_k, index_weights)]
    chosen = None if indices is None else indices.contiguous()
    total, losses = IndexerKL.apply(*detached, scale, *trained, starts, ends, chosen)  # type: ignore[no-untyped-call]
    return total, losses


def visible_keys(keys: int, starts: Tensor | None, ends: Tensor | None, indices: Tensor | None) -> Tensor:
    """Mark the keys selected for a query (`[..., T, K]`), or that it sees (`[..., T]`): `[..., T, L]`, bool."""
    if indices is not None:
        visible = torch.zeros((*indices.shape[:-1], keys + 1), dtype=torch.bool, device=indices.device)
        return visible.scatter_(-1, indices.long() % (keys + 1), True)[..., :keys]  # -1 becomes the last column
    assert starts is not None and ends is not None
    positions = torch.arange(keys, device=starts.device)
    return (positions >= starts[..., None]) & (positions < ends[..., None])
