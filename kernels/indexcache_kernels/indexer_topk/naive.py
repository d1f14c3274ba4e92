"""The definition, in PyTorch: dense scores of some queries at a time, then their highest."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 128  # queries at a time, whose scores stay in the cache of a CPU's core


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
    products = (q.to(dtype).flatten(-3, -2) @ k.to(dtype).transpose(-1, -2)).relu_()
    scores = (weights.to(dtype).unsqueeze(-2) @ products.view(*weights.shape, k.shape[-2])).squeeze(-2)
    return scores if k_scale is None else scores * k_scale.to(dtype)


def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, *, starts: Tensor, ends: Tensor, topk: int, k_scale: Tensor | None = None
) -> Tensor:
    """Compute `indexcache_kernels.indexer_topk`, a block of queries at a time, with the keys that one of it sees."""
    selected = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    for at in range(0, len(q), ROWS):
        rows = slice(at, at + ROWS)
        first, end = max(0, int(starts[rows].min())), min(int(ends[rows].max()), len(k))
        if first >= end:
            continue
        keys = torch.arange(first, end, device=k.device)
        inside = (keys >= starts[rows, None]) & (keys < ends[rows, None])
        scale = None if k_scale is None else k_scale[first:end]
        chosen = _highest(indexer_scores(q[rows], k[first:end], weights[rows], scale), inside, topk)
        row, key = chosen.nonzero(as_tuple=True)
        before = chosen.sum(dim=1).cumsum(0).roll(1)
        before[0] = 0
        selected[at + row, torch.arange(len(row), device=k.device) - before[row]] = keys[key].int()
    return selected


def _highest(scores: Tensor, inside: Tensor, topk: int) -> Tensor:
    """Return which keys `inside` score highest, `[rows, keys]`: `topk` or all, the first ones of equal scores."""
    scores = scores.masked_fill(~inside, -torch.inf)
    count = min(topk, scores.shape[1])
    lowest = scores.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, equal = scores > lowest, (scores == lowest) & inside
    return above | (equal & (equal.cumsum(dim=1) <= count - above.sum(dim=1, keepdim=True)))
