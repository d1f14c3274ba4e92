"""The definition, in PyTorch: dense scores of some queries at a time, of which the selected keys are kept."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 128  # queries at a time, whose scores stay in the cache of a CPU's core


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `indexcache_kernels.sparse_attention`, in float64 where `q` is, else in float32."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not len(k):  # a key that nobody selects
        k, v = (item.new_zeros(1, *item.shape[1:]) for item in (k, v))
    keys, values = (item.to(dtype).transpose(0, 1) for item in (k, v))  # [G, L, .]
    parts = [
        _attend(queries.to(dtype) * scale, keys, values, chosen)
        for queries, chosen in zip(torch.split(q, ROWS), torch.split(indices, ROWS), strict=True)
    ]
    out, lse = (torch.cat(items) for items in zip(*parts, strict=True))
    return out.to(q.dtype), lse.detach()


def _attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Attend as `sparse_attention`, to keys `[G, L, D]` and values `[G, L, V]` between the first and last selected."""
    rows, groups, dim = len(q), len(k), q.shape[2]
    group = q.shape[1] // max(1, groups)
    chosen = indices[indices >= 0]
    first, end = (int(chosen.min()), int(chosen.max()) + 1) if len(chosen) else (0, 1)
    k, v, seen = k[:, first:end], v[:, first:end], end - first
    places = torch.where(indices < 0, seen, indices - first).long()
    selected = torch.zeros(rows, seen + 1, dtype=torch.bool, device=q.device).scatter_(1, places, True)[:, :seen]
    scores = q.reshape(rows, groups, group, dim).transpose(0, 1).flatten(1, 2) @ k.transpose(1, 2)
    scores = scores.view(groups, rows, group, seen).masked_fill(~selected[:, None], -torch.inf)
    highest = scores.detach().amax(dim=3, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=3, keepdim=True)  # at least 1 where a key is selected
    out = (weights.flatten(1, 2) @ v).view(*scores.shape[:3], v.shape[2]) / total.masked_fill(total == 0, 1.0)
    out, lse = (item.transpose(0, 1).flatten(1, 2) for item in (out, total.log() + highest))
    return out, lse.squeeze(2)
