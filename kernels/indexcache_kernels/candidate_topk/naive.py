"""The definition, in PyTorch: scores of gathered keys, then a sort."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from indexcache_kernels.candidate_topk.pages import Pages
from indexcache_kernels.indexer_topk.naive import indexer_scores

_BEHIND = torch.iinfo(torch.int32).max  # every token
_ROWS = 16  # queries whose keys are gathered at a time


def candidate_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    candidates: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
    pages: Pages | None = None,
) -> Tensor:
    """See `indexcache_kernels.candidate_topk`."""
    parts = [torch.empty((0, topk), dtype=torch.int32, device=q.device)]
    everything, scales = k.float().flatten(0, -2), None if k_scale is None else k_scale.flatten()
    for at in range(0, len(q), _ROWS):
        rows = slice(at, at + _ROWS)
        chosen = candidates[rows]
        tokens = chosen.clamp_min(0).long()
        if pages is not None:
            size = k.shape[1]
            page = pages.table[pages.requests[rows].long()].long().gather(1, tokens // size)
            tokens = page * size + tokens % size
        scores = indexer_scores(q[rows, None], everything[tokens], weights[rows, None])[:, 0]  # [rows, N]
        if scales is not None:
            scores = scores * scales[tokens]
        order = scores.masked_fill(chosen < 0, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :topk]
        best = F.pad(chosen.gather(1, order), (0, topk - order.shape[1]), value=-1)
        best = best.masked_fill(best < 0, _BEHIND).sort(dim=1).values
        parts.append(best.masked_fill(best == _BEHIND, -1).int())
    return torch.cat(parts)
