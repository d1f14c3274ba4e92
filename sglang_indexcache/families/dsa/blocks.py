"""F layers of SGLang's DSA models that select for blocks of neighbouring prompt queries.

`Indexer._get_topk_ragged` selects for all queries of a prefill; decoding goes through another method. A
`BlockSelection` replaces it on the indexers of layers that select in blocks, and on no others. It hands SGLang's method
two lots of rows: queries that select for themselves, and a *leader* for each block. `indexcache_search.hf.indexers`
says what a block is, and what its queries attend to. Here all queries of a block are in the forward pass. The last
`EXACT_ROWS` queries of each request in it select for themselves: nobody can know whether a chunk is a prompt's last.

Read: dsa_indexer.py, dsa_indexer_metadata.py, dsa_topk_backend.py and dsa_prefill_cuda_graph.py in
sglang/srt/layers/attention/dsa of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_indexcache.families.dsa.index_space import in_index_space
from sglang_indexcache.families.dsa.rows import Prefill, PrefillSelection, Rows, take
from sglang_indexcache.families.dsa.shards import ALONE, Shards
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS

_PLANS = "_indexcache_blocks"


def blocks_of(prefixes: Sequence[int], lengths: Sequence[int], queries: int, topk: int) -> list[tuple[int, int, int]]:
    """Find the blocks whose queries share a selection: whole ones, not at a request's end, with something to select.

    Args:
        prefixes: tokens of each request that were computed before.
        lengths: tokens of each request in this forward pass.
        queries: number of queries of a block.
        topk: tokens of a selection; up to there everything is selected.

    Returns:
        For each block, the row of its first query, the position of that query in its request, and the request's number.
    """
    found: list[tuple[int, int, int]] = []
    row = 0
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        choice = (topk // queries) * queries  # the block of the first query that selects
        first = max(-(-prefix // queries) * queries, choice)
        end = prefix + length - EXACT_ROWS
        found += [(row + begin - prefix, begin, request) for begin in range(first, end - queries + 1, queries)]
        row += length
    return found


class BlockSelection(PrefillSelection):
    """A layer that selects for the queries of a prompt in blocks.

    Args:
        indexer: SGLang's.
        queries: number of queries of a block.
        shards: this rank's part of the blocks, and of the rows that select for themselves.
    """

    def __init__(self, indexer: Any, queries: int, shards: Shards = ALONE) -> None:
        super().__init__(indexer, shards)
        self.queries = queries

    def _select(self, prefill: Prefill) -> Tensor:
        queries, gates, metadata = prefill.queries, prefill.gates, prefill.metadata
        plan = self._plan(prefill.forward_batch, queries.device)
        if plan is None:
            return super()._select(prefill)
        result, device = prefill.result(self.indexer.index_topk), queries.device
        result[plan.exact] = self.shards.select(
            len(plan.exact), device, lambda rows: prefill.select_rows(plan.exact[rows], plan.exact_requests[rows])
        )

        def best_of(blocks: Tensor | slice) -> Tensor:
            members = plan.members[blocks]
            leaders = take(queries, members.flatten()).float().view(*members.shape, *queries.shape[1:]).mean(1)
            means = gates[members].mean(1)
            rows = _Leaders(metadata, members[:, 0], plan.requests[blocks], plan.begins[blocks])
            return prefill.select(leaders.to(queries.dtype), means, rows)

        best = self.shards.select(len(plan.members), device, best_of)[:, : -self.queries]
        own = plan.begins[:, None] + torch.arange(self.queries, device=device, dtype=torch.int32)
        first = plan.members[:, 0]
        own, best = (in_index_space(metadata, positions, first, plan.requests) for positions in (own, best))
        result[plan.members.flatten()] = _with_own(own, best).flatten(0, 1)
        return result

    def _plan(self, forward_batch: Any, device: torch.device) -> _BlockRows | None:
        """Return where the rows of a forward pass are, computed once for all layers; `None` without blocks."""
        plans: dict[tuple[int, int], _BlockRows | None] = forward_batch.__dict__.setdefault(_PLANS, {})
        key = (self.queries, self.indexer.index_topk)
        if key not in plans:
            prefixes, lengths = (
                [int(count) for count in counts]
                for counts in (forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu)
            )
            blocks = blocks_of(prefixes, lengths, *key)
            plans[key] = _BlockRows.of(blocks, lengths, self.queries, device) if blocks else None
        return plans[key]


@dataclass(frozen=True)
class _BlockRows:
    """The blocks of a forward pass on a device: B blocks of Q queries, E other rows."""

    members: Tensor  # [B, Q], rows
    begins: Tensor  # [B], positions, int32
    requests: Tensor  # [B]
    exact: Tensor  # [E], rows
    exact_requests: Tensor  # [E]

    @classmethod
    def of(
        cls, blocks: Sequence[tuple[int, int, int]], lengths: Sequence[int], queries: int, device: torch.device
    ) -> _BlockRows:
        rows, begins, requests = map(torch.tensor, zip(*blocks, strict=True))
        members = rows[:, None] + torch.arange(queries)
        alone = torch.ones(sum(lengths), dtype=torch.bool)
        alone[members.flatten()] = False
        exact = alone.nonzero().squeeze(1)
        request_of_row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        parts = (members, begins.int(), requests, exact, request_of_row[exact])
        return cls(*(part.to(device, non_blocking=True) for part in parts))


class _Leaders(Rows):
    """A `DSAIndexerMetadata` of blocks, which select from the tokens before them; positions, the best first."""

    def __init__(self, metadata: Any, rows: Tensor, requests: Tensor, begins: Tensor) -> None:
        super().__init__(metadata, rows, requests)
        starts, ends = self._range
        self._lengths = begins.to(self._lengths.dtype)
        self._range = starts, starts + begins.to(ends.dtype)

    def topk_transform(self, logits: Tensor, topk: int, **given: Any) -> Tensor:
        lengths, starts = given.get("ke_offset"), given["ks"]
        lengths = self._lengths if lengths is None else lengths
        chosen: Tensor = self._metadata.topk_backend.topk_func(logits, lengths, topk, row_starts=starts)
        columns = (chosen + starts[:, None]).clamp_min(0).long()
        scores = logits.gather(1, columns).masked_fill(chosen < 0, float("-inf"))
        return chosen.gather(1, scores.sort(dim=1, descending=True, stable=True).indices)


def _with_own(own: Tensor, best: Tensor) -> Tensor:
    """Return what queries attend to, `[blocks, queries, k]`: the best before their block, then it up to themselves.

    What a query selects are the first of its row, -1 follows, as SGLang's kernels expect it.

    Args:
        own: the tokens of each block, `[blocks, queries]`.
        best: tokens before each block, `[blocks, k - queries]`.
    """
    size = own.shape[1]
    seen = torch.ones(size, size, dtype=torch.bool, device=own.device).tril()
    return torch.cat([best[:, None].expand(-1, size, -1), torch.where(seen, own[:, None], -1)], dim=2)
