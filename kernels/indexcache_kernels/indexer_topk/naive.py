"""The definition, in PyTorch: dense scores, then a sort."""

from __future__ import annotations

import torch
from torch import Tensor


def indexer_scores(q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None = None) -> Tensor:
    """Compute lightning-indexer scores (DeepSeek-V3.2, Eq. 1): the sum over heads of weight x ReLU(q . k).

    Args:
        q: `[..., T, I, C]`.
        k: `[..., L, C]`.
        weights: `[..., T, I]`.
        k_scale: `[L]`, what the rows of a quantised `k` are multiplied by.

    Returns:
        `[..., T, L]`, in float64 where `weights` is, else in float32.
    """
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    products = torch.einsum("...tic,...lc->...til", q.to(dtype), k.to(dtype)).relu()
    scores = torch.einsum("...til,...ti->...tl", products, weights.to(dtype))
    return scores if k_scale is None else scores * k_scale.to(dtype)


def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, *, starts: Tensor, ends: Tensor, topk: int, k_scale: Tensor | None = None
) -> Tensor:
    """Compute `indexcache_kernels.indexer_topk`."""
    scores = indexer_scores(q, k, weights, k_scale)
    keys = torch.arange(k.shape[0], device=k.device)
    inside = (keys >= starts[:, None]) & (keys < ends[:, None])
    order = scores.masked_fill(~inside, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :topk]
    count = inside.sum(dim=1, keepdim=True).clamp(max=topk)
    rank = torch.arange(order.shape[1], device=k.device)
    chosen = order.masked_fill(rank >= count, k.shape[0]).sort(dim=1).values
    selected = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    selected[:, : chosen.shape[1]] = chosen.masked_fill(chosen == k.shape[0], -1)
    return selected
