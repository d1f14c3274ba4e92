"""The definition, in PyTorch: both distributions over all keys, dense."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_kernels.indexer_topk.naive import indexer_scores


def indexer_kl(
    q: Tensor, k: Tensor, scale: float, index_q: Tensor, index_k: Tensor, index_weights: Tensor, visible: Tensor
) -> Tensor:
    """Compute KL(mean over heads of the attention || softmax of the index scores) over each query's visible keys.

    Args:
        q: `[T, H, D]`, of the attention.
        k: `[L, G, D]`.
        scale: what their products are multiplied by.
        index_q: `[T, I, C]`.
        index_k: `[L, C]`.
        index_weights: `[T, I]`.
        visible: `[T, L]`, bool.

    Returns:
        `[T]`, in nats; 0 where nothing is visible.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    hidden = ~visible & visible.any(dim=1, keepdim=True)  # queries that see nothing are left out at the end
    scores = (torch.einsum("thd,lhd->thl", q.to(dtype), keys) * scale).masked_fill(hidden[:, None], -torch.inf)
    target = scores.softmax(dim=2).mean(dim=1).detach()
    index = indexer_scores(index_q, index_k, index_weights).masked_fill(hidden, -torch.inf)
    terms = target * (target.log() - index.log_softmax(dim=1))
    return terms.masked_fill((target == 0) | ~visible, 0.0).sum(dim=1)
