"""F layers of SGLang's DSA models that select for blocks of neighbouring prompt queries.

`Indexer._get_topk_ragged` selects for all queries of a prefill; decoding goes through another method. A
`BlockSelection` replaces it on the indexers of layers that select in blocks, and on no others. It hands SGLang's method
two kinds of rows in one call: a *leader* for each block, and queries that select for themselves.
`indexcache_search.hf.indexers` says what a block is, and what its queries attend to. Here all queries of a block are in
the forward pass, on whichever rank of context parallelism. The last `EXACT_ROWS` queries of each request in it select
for themselves: nobody can know whether a chunk is a prompt's last.

Read: dsa_indexer.py, dsa_indexer_metadata.py, dsa_topk_backend.py and dsa_prefill_cuda_graph.py in
sglang/srt/layers/attention/dsa of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels.prompt_blocks import IndexSpace, expand_blocks, lowest_last, mean_queries
from sglang_indexcache.families.dsa.blocks.context import ONE_RANK, Context
from sglang_indexcache.families.dsa.blocks.index_space import index_space
from sglang_indexcache.families.dsa.blocks.rows import Prefill, PrefillSelection, RowsMetadata
from sglang_indexcache.families.dsa.blocks.shards import ALONE, Shards
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS

_PLANS = "_indexcache_blocks"


@dataclass(frozen=True)
class Run:
    """Blocks of one request, one behind the other.

    Attributes:
        row: the row of their first query in the pass.
        begin: its position in the request.
        request: number of the request.
        count: number of blocks.
    """

    row: int
    begin: int
    request: int
    count: int


def blocks_of(prefixes: Sequence[int], lengths: Sequence[int], queries: int, topk: int) -> list[Run]:
    """Find the blocks whose queries share a selection: whole ones, not at a request's end, with something to select.

    Args:
        prefixes: tokens of each request that were computed before.
        lengths: tokens of each request in this forward pass.
        queries: number of queries of a block.
        topk: tokens of a selection; up to there everything is selected.
    """
    found: list[Run] = []
    row = 0
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        choice = (topk // queries) * queries  # the block of the first query that selects
        first = max(-(-prefix // queries) * queries, choice)
        count = (prefix + length - EXACT_ROWS - first) // queries
        if count > 0:
            found.append(Run(row + first - prefix, first, request, count))
        row += length
    return found


def scored_rows(prefix: int, rows: int, topk: int, queries: int = 1, ranks: int = 1) -> int:
    """Return the rows that a layer scores, on one of `ranks` that share them out, of one request; see `blocks_of`."""
    runs = blocks_of([prefix], [rows], queries, topk) if queries > 1 else []
    count = rows - (queries - 1) * sum(run.count for run in runs)
    shards = replace(ALONE, ranks=ranks)
    return shards.share(count) if shards.pays(count, prefix + rows / 2) else count


@dataclass(eq=False)
class BlockPlan:
    """Rows that select in a forward pass: blocks of Q queries, and queries that select for themselves.

    All layers of the pass that select in such blocks have one plan.

    Args:
        columns: `[4, R]`, int32: the first query of each row, its number of queries (Q or 1), the position of the first
            query of a block (0 for others), and the place of a query of its request that is on this rank.

    Attributes:
        layers: the layers that have selected with this plan.
    """

    columns: Tensor
    first: Tensor = field(init=False)
    sizes: Tensor = field(init=False)
    begins: Tensor = field(init=False)
    places: Tensor = field(init=False)
    layers: set[int] = field(default_factory=set)
    _rows: _BlockRows | None = None
    _space: IndexSpace | None = None
    _own: BlockPlan | None = None

    def __post_init__(self) -> None:
        self.first, self.sizes, self.begins, self.places = self.columns

    def rows(self, metadata: Any) -> _BlockRows:
        """Return the metadata of these rows; the first layer of the pass makes its tensors."""
        if self._rows is None:
            self._rows = _BlockRows(metadata, *self._like(metadata))
            self._rows.select_in(self)
        return self._rows.over(metadata)

    def space(self, metadata: Any) -> IndexSpace:
        """Return how positions of these rows become indices, for all layers of the pass."""
        if self._space is None:
            self._space = index_space(metadata, *self._like(metadata))
        return self._space

    def own(self, rows: Tensor) -> BlockPlan:
        """Return the plan of those of these rows that this rank selects for, for all layers of the pass."""
        if self._own is None:
            self._own = BlockPlan(self.columns[:, rows])
        return self._own

    def _like(self, metadata: Any) -> tuple[Tensor, Tensor]:
        """Return for each row the place of one of its request that is here, and SGLang's number of the request here."""
        return self.places, metadata.get_token_to_batch_idx()[self.places]


@dataclass(eq=False)
class WholePlan(BlockPlan):
    """The plan of all rows of a pass: B blocks, then the E queries that select for themselves and are on this rank.

    Attributes:
        context: which queries are on this rank.
        queries: number of queries of a block, Q.
        blocks: number of blocks, B.
        count: number of queries of the pass.
        begin: the place of the first query of the first block, if all blocks are contiguous; else `None`.
        mine: the plan of the rows that this rank of context parallelism selects for: every n-th block, and the other
            queries.
        seen: `[B x queries_here]`, int32: how many tokens of its block each query of a block sees that is on this rank,
            if all do not see up to themselves.
    """

    context: Context = ONE_RANK
    queries: int = 0
    blocks: int = 0
    count: int = 0
    begin: int | None = None
    mine: BlockPlan | None = None
    seen: Tensor | None = None

    @classmethod
    def of(
        cls,
        runs: Sequence[Run],
        lengths: Sequence[int],
        queries: int,
        device: torch.device,
        here: Context = ONE_RANK,
    ) -> WholePlan:
        """Lay out blocks, see `blocks_of`, and the other queries of requests with these lengths, in one copy."""
        blocks, count = sum(run.count for run in runs), sum(lengths)
        ends = [0, *(row for run in runs for row in (run.row, run.row + run.count * queries)), count]
        alone = [here.among(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]
        rows = blocks + sum(map(len, alone))
        columns = torch.zeros(4, rows, dtype=torch.int32)
        first, sizes, begins, places = columns
        sizes[:blocks], sizes[blocks:] = queries, 1
        at = 0
        for run in runs:
            after = at + run.count
            torch.arange(run.row, run.row + run.count * queries, queries, out=first[at:after])
            torch.arange(run.begin, run.begin + run.count * queries, queries, out=begins[at:after])
            at = after
        for exact in alone:
            after = at + len(exact)
            torch.arange(exact.start, exact.start + len(exact) * exact.step, exact.step, out=first[at:after])
            at = after
        places.copy_(here.place(first))
        given: dict[str, Any] = {"context": here, "queries": queries, "blocks": blocks, "count": count}
        given["begin"] = here.place(runs[0].row) if len(runs) == 1 else None
        if here.ranks == 1:
            return cls(_sent([columns], device)[0], **given)
        mine = torch.cat([columns[:, :blocks][:, here.rank :: here.ranks], columns[:, blocks:]], 1)
        number = torch.arange(0, queries, here.ranks, dtype=torch.int32)
        seen = (here.rank - first[:blocks]).remainder(here.ranks)[:, None] + number + 1
        columns, mine, seen = _sent([columns, mine, seen], device)
        return cls(columns, **given, mine=BlockPlan(mine), seen=seen.flatten())

    @property
    def queries_here(self) -> int:
        """The number of queries of a block that are on this rank, one behind the other, if ranks divide it."""
        return self.queries // self.context.ranks

    @cached_property
    def exact(self) -> Tensor | slice:
        """Places of the queries that select for themselves, `[E]`; a slice behind all blocks, if ranks divide them."""
        if self.begin == 0:
            return slice(self.blocks * self.queries_here, self.context.count(self.count))
        return self.places[self.blocks :].long()

    @cached_property
    def members(self) -> Tensor:
        """The places of the queries of the blocks, block by block, `[B x queries_here]`."""
        within = torch.arange(self.queries_here, device=self.first.device)
        return (self.places[: self.blocks].long()[:, None] + within).flatten()


class BlockSelection(PrefillSelection):
    """A layer that selects for `queries` of a prompt at a time; shards are of blocks, and of rows outside of them."""

    def __init__(self, indexer: Any, queries: int, shards: Shards = ALONE, ranks: Context = ONE_RANK) -> None:
        super().__init__(indexer, shards, ranks)
        self.queries = queries

    def _select(self, prefill: Prefill) -> Tensor:
        plan = self._plan(prefill)
        if plan is None:
            return super()._select(prefill)
        here, part, own = prefill.context, None, plan.mine or plan
        if here.ranks == 1 and self.shards.pays(len(plan.first), prefill.keys):
            part = self.shards.part(len(plan.first), plan.first.device, prefill.kept)
            own = plan.own(part.own)
        queries, gates = here.queries(prefill.queries, prefill.gates, plan.count)
        means = mean_queries(queries, gates, own.first, own.sizes, ranks=here.ranks)
        chosen = prefill.select(*means, own.rows(prefill.metadata))
        if here.ranks > 1:
            of_blocks = here.count(plan.blocks)
            chosen = torch.cat([here.every(chosen[:of_blocks], plan.blocks), chosen[of_blocks:]])
        elif part is not None:
            chosen = self.shards.exchange(chosen, part)
        result = prefill.result(self.indexer.index_topk)
        space = plan.space(prefill.metadata)
        where = plan.first, plan.sizes, plan.begins
        expand_blocks(chosen, *where, space, result, rank=here.rank, ranks=here.ranks)
        plan.layers.add(prefill.layer)
        return result

    def _plan(self, prefill: Prefill) -> WholePlan | None:
        """Return where the rows of a forward pass are, computed once for all layers; `None` without blocks."""
        key = (self.queries, self.indexer.index_topk)
        of_pass = prefill.metadata.attn_metadata  # so that no plan outlives its pass, whatever SGLang keeps
        plans: dict[tuple[int, int], tuple[Any, WholePlan | None]] = prefill.kept.setdefault(_PLANS, {})
        if key not in plans or plans[key][0] is not of_pass:
            prefill.context.check(prefill.metadata, prefill.prefixes, prefill.lengths)
            blocks, plan = blocks_of(prefill.prefixes, prefill.lengths, *key), None
            if blocks:
                device = prefill.queries.device
                plan = WholePlan.of(blocks, prefill.lengths, self.queries, device, prefill.context)
            plans[key] = of_pass, plan
        return plans[key][1]


def _sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return int32 tensors on a device, in one copy that nobody waits for."""
    whole = torch.cat([item.flatten() for item in tensors])
    whole = (whole.pin_memory() if device.type == "cuda" else whole).to(device, non_blocking=True)
    parts = torch.split(whole, [item.numel() for item in tensors])
    return [part.view(item.shape) for part, item in zip(parts, tensors, strict=True)]


def plan_for(forward_batch: Any, layer: int) -> WholePlan | None:
    """Return the plan that a layer has selected with in a forward pass; `None` if it did not select in blocks."""
    plans: dict[tuple[int, int], tuple[Any, WholePlan | None]] = vars(forward_batch).get(_PLANS, {})
    return next((plan for _, plan in plans.values() if plan is not None and layer in plan.layers), None)


class _BlockRows(RowsMetadata):
    """The metadata of a plan's rows: blocks select from the tokens before them, and all get positions.

    The Q keys of a block with the lowest scores come last.
    """

    given_up: Tensor
    _done = 0

    def select_in(self, plan: BlockPlan) -> None:
        """Let blocks select from the tokens before them."""
        in_blocks = plan.sizes > 1
        self.lengths = torch.where(in_blocks, plan.begins, self.lengths)
        self.ends = torch.where(in_blocks, self.starts + plan.begins, self.ends)
        self.given_up = torch.where(in_blocks, plan.sizes, 0)

    def topk_transform(self, logits: Tensor, topk: int, **given: Any) -> Tensor:
        """Select positions; SGLang hands over all rows, or a few at a time, in their order."""
        lengths, starts = given.get("ke_offset"), given["ks"]
        lengths = self.lengths if lengths is None else lengths
        chosen: Tensor = self.metadata.topk_backend.topk_func(logits, lengths, topk, row_starts=starts)
        begin, self._done = self._done, self._done + len(logits)
        return lowest_last(logits, chosen, starts, self.given_up[begin : self._done])
