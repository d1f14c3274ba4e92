"""What selecting in blocks means on DeepSeek-V4: transformers' indexers, with other scores for queries of prompts.

The definition, not a fast implementation: every query's own scores are computed, too. Shapes: B sequences, S queries, H
heads, D index width, E entries, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from indexcache_kernels.patching import replaced
from indexcache_lab.v4_blocks import RATIO, check_queries
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.pattern.indexer_setting import IndexerSetting

Scorer = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextmanager
def in_blocks(model: Any, settings: Iterable[IndexerSetting], prompt: Tensor) -> Iterator[None]:
    """Let letters of a model select in blocks inside the `with` block, where their indexers run.

    Sequences begin with their first token and run in one pass.

    Args:
        model: transformers' DeepSeek-V4.
        settings: letters, and the queries of a block of each.
        prompt: `[B, S]`, bool: queries that may share a selection; a leader is the mean of those of its block.

    Raises:
        PatternError: if a block does not fit the model.
    """
    indexers: list[Any] = DEEPSEEK_V4.transformers.indexer_modules(model)
    changes: list[tuple[Any, str, Any]] = []
    for item in settings:
        indexer = indexers[item.layer]
        check_queries(item.queries, indexer.index_topk, model.config.sliding_window)
        changes.append(
            (indexer.scorer, "forward", scoring(indexer.scorer.forward, item.queries, indexer.index_topk, prompt))
        )
    with replaced(*changes):
        yield


def scoring(run: Scorer, queries: int, index_topk: int, prompt: Tensor) -> Scorer:
    """Return what takes the place of a scorer: index queries `[B, S, H, D]` and hidden states to scores `[B, S, E]`.

    Gates are linear in hidden states, so the gates of a mean are the mean of gates. A block whose first query sees
    fewer than `index_topk` entries shares nothing.
    """

    def forward(q: Tensor, compressed: Tensor, hidden: Tensor) -> Tensor:
        length, entries = prompt.shape[1], compressed.shape[1]
        if q.shape[1] != length:
            raise ValueError(f"{q.shape[1]} queries run at once, expected all {length} of a sequence")
        blocks = (len(prompt), -(-length // queries), queries)
        counted = F.pad(prompt, (0, -length % queries)).view(blocks)
        share = counted / counted.sum(2, keepdim=True).clamp_min(1)  # of each query in its leader, [B, N, Q]
        leaders, states = (
            (F.pad(item.float().flatten(2), (0, 0, 0, -length % queries)).view(*blocks, -1) * share[..., None]).sum(2)
            for item in (q, hidden)
        )
        scores = run(leaders.view(*leaders.shape[:2], *q.shape[2:]).to(q.dtype), compressed, states.to(hidden.dtype))
        begins = torch.arange(0, length, queries, device=q.device)[:, None]
        complete = torch.arange(entries, device=q.device) < (begins + 1) // RATIO
        scores = scores.masked_fill(~complete, float("-inf")).repeat_interleave(queries, 1)[:, :length]
        full = ((begins + 1) // RATIO >= index_topk).repeat_interleave(queries, 0)[:length, 0]
        return torch.where((prompt & full)[..., None], scores, run(q, compressed, hidden))

    return forward
