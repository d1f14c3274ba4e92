"""The definition, in PyTorch: scores of gathered keys, then a sort."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from indexcache_kernels.indexer_topk.naive import indexer_scores

_ROWS = 16  # queries whose keys are gathered at a time


def candidate_topk(
    q: Tensor, k: Tensor, weights: Tensor, *, candidates: Tensor, topk: int, k_scale: Tensor | None = None
) -> Tensor:
    """See `indexcache_kernels.candidate_topk`."""
    everything, parts = k.float(), [q.new_empty((0, topk), dtype=torch.int32)]
    for at in range(0, len(q), _ROWS):
        rows = slice(at, at + _ROWS)
        chosen = candidates[rows]
        tokens = chosen.clamp_min(0).long()
        scores = indexer_scores(q[rows, None], everything[tokens], weights[rows, None])[:, 0]  # [rows, N]
        if k_scale is not None:
            scores = scores * k_scale[tokens]
        order = scores.masked_fill(chosen < 0, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :topk]
        best = F.pad(chosen.gather(1, order), (0, topk - order.shape[1]), value=-1)
        best = best.masked_fill(best < 0, len(k)).sort(dim=1).values
        parts.append(best.masked_fill(best == len(k), -1).int())
    return torch.cat(parts)
