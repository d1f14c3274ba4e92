"""Indexers of transformers' DSA models on a CPU: the same selections without the scores that a mask hides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels.indexer_forward import indexer_forward
from indexcache_kernels.transformers import INDEXER_ROPES, index_vectors
from indexcache_search.hf.indexers import check_call

QUERIES = 128  # scored at a time


def causal(indexer: Any, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `run`, the `forward` of an indexer, so that no query is scored with the keys behind its block.

    What is left is computed as transformers does, but for all heads at once, and hidden keys have the mask's value. So
    selections are the same to the last index, ties and what fills up short ones included. With a key/value cache, or a
    mask that shows later keys, `run` itself runs.
    """
    check_call(indexer)

    def compute(hidden: Tensor, q_resid: Tensor, rotary: tuple[Tensor, Tensor], given: Tensor, *rest: Any) -> Tensor:
        batch, length, _ = hidden.shape
        blocks = [slice(begin, begin + QUERIES) for begin in range(0, length, QUERIES)]
        mask = torch.where(given, 0.0, -torch.inf) if given.dtype == torch.bool else given
        lowest, (_, cache) = torch.finfo(mask.dtype).min, rest
        if cache is not None or any((mask[:, rows, rows.stop :] > lowest).any() for rows in blocks):
            return run(hidden, q_resid, rotary, given, *rest)
        q, k, _ = index_vectors(indexer, INDEXER_ROPES[indexer.config.model_type], hidden, q_resid, rotary)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        weights, scores = weights * indexer.n_heads**-0.5, mask.float().expand(batch, -1, -1).clone()
        for rows in blocks:
            heads = q[:, rows].flatten(1, 2).float() @ k[:, : rows.stop].float().mT
            heads = heads.mul_(indexer.softmax_scale).relu_().view(batch, -1, indexer.n_heads, heads.shape[-1])
            scores[:, rows, : rows.stop] += (weights[:, rows, None] @ heads).squeeze(2)
        return scores.topk(min(indexer.index_topk, length), dim=-1).indices.int()

    return indexer_forward(compute)
