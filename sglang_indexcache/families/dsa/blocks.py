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

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_indexcache.families.dsa.index_space import in_index_space
from sglang_indexcache.families.dsa.needs import PREFILL
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS
from sglang_indexcache.sglang.hooks import refusing_around

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


class BlockSelection:
    """A replacement of an F layer's `Indexer._get_topk_ragged`, which selects for the queries of a prompt in blocks.

    An error in here ends the process.

    Args:
        indexer: SGLang's.
        queries: number of queries of a block.
    """

    def __init__(self, indexer: Any, queries: int) -> None:
        self.indexer, self.queries = indexer, queries
        self._sglangs = MethodType(getattr(type(indexer), PREFILL), indexer)
        self._signature, self._guarded = inspect.signature(self._sglangs), refusing_around(self._select)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Select as SGLang's method does: `[rows, index_topk]`, int32, in its index space, -1 for none."""
        selected: Tensor = self._guarded(self._sglangs, *args, **kwargs)
        return selected

    def _select(self, sglangs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = self._signature.bind(*args, **kwargs).arguments
        q, weights, metadata, result = given["q_fp8"], given["weights"], given["metadata"], given.get("topk_result")
        plan = self._plan(given["forward_batch"], q.device)
        if plan is None:
            return sglangs(**given)
        if result is None:
            result = torch.full((len(q), self.indexer.index_topk), -1, device=q.device, dtype=torch.int32)

        def selected(queries: Tensor, gates: Tensor, rows: _Rows) -> Tensor:
            return sglangs(**given | {"q_fp8": queries, "weights": gates, "metadata": rows, "topk_result": None})

        exact = _Rows(metadata, plan.exact, plan.exact_requests)
        result[plan.exact] = selected(_take(q, plan.exact), weights[plan.exact], exact)

        members, (count, size) = plan.members.flatten(), plan.members.shape
        leaders = _take(q, members).float().view(count, size, *q.shape[1:]).mean(1).to(q.dtype)
        gates = weights[members].view(count, size, *weights.shape[1:]).mean(1)
        first = plan.members[:, 0]
        best = selected(leaders, gates, _Leaders(metadata, first, plan.requests, plan.begins))[:, :-size]
        own = plan.begins[:, None] + torch.arange(size, device=q.device, dtype=torch.int32)
        own, best = (in_index_space(metadata, positions, first, plan.requests) for positions in (own, best))
        result[members] = _with_own(own, best).flatten(0, 1)
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


class _Rows:
    """A `DSAIndexerMetadata` for some rows; all that does not depend on rows is the full metadata's."""

    def __init__(self, metadata: Any, rows: Tensor, requests: Tensor) -> None:
        self._metadata, self._requests = metadata, requests
        starts, ends = metadata.get_indexer_kvcache_range()
        self._range = starts[rows], ends[rows]
        self._lengths: Tensor = metadata.get_seqlens_expanded()[rows]
        offsets = metadata.attn_metadata.topk_indices_offset
        self.attn_metadata = SimpleNamespace(topk_indices_offset=None if offsets is None else offsets[rows])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)

    def get_indexer_kvcache_range(self) -> tuple[Tensor, Tensor]:
        return self._range

    def get_seqlens_expanded(self) -> Tensor:
        return self._lengths

    def get_token_to_batch_idx(self) -> Tensor:
        return self._requests

    def topk_transform(self, logits: Tensor, topk: int, **given: Any) -> Tensor:
        """Select like the full metadata's method, which without `ke_offset` assumes all rows, for these rows only."""
        if given.get("ke_offset") is None:
            given["ke_offset"] = self._lengths
            if self.attn_metadata.topk_indices_offset is not None:
                given["topk_indices_offset_override"] = self.attn_metadata.topk_indices_offset
            else:
                given["cu_seqlens_q"] = torch.ones(len(logits), dtype=torch.int32, device=logits.device)
                given["batch_idx_list"] = self._requests
        selected: Tensor = self._metadata.topk_transform(logits, topk, **given)
        return selected


class _Leaders(_Rows):
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


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """Return `values[rows]`, also for fp8, which has no indexing."""
    return values.view(torch.uint8)[rows].view(values.dtype)


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
