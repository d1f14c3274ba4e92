"""C4 layers of SGLang that select for blocks of prompt queries: `forward_c4_indexer` of one attention backend.

SGLang's method projects index queries, writes index keys, scores and selects, row by row: row i of metadata belongs to
query i. Here it runs once with fewer rows: a *leader* for each block, and the queries that select for themselves. It is
called with metadata of the first query of each row, and an indexer whose `compute_q` gives the means of the rows. What
it selected is then copied to the queries. `indexcache_lab.v4_blocks` says what a block is; the last `EXACT_ROWS` of
each request in a pass select for themselves, as on DSA models.

A pass that is none of plain prompts, or whose rows are not one for each query, is SGLang's own. Read:
layers/attention/dsv4/indexer.py and metadata.py, layers/attention/deepseek_v4_backend.py of 0.5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels.prompt_blocks import mean_queries
from indexcache_lab.v4_blocks import RATIO
from sglang_indexcache.families.dsa.blocks.selection import WholePlan, blocks_of
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.sglang.hooks import refusing_around

METHOD = "forward_c4_indexer"
_PLANS, _PLACE = "_indexcache_v4_blocks", "_indexcache_v4_blocks"


@dataclass(frozen=True)
class EntryPlan:
    """The rows of a pass, for all layers with blocks of as many queries.

    Attributes:
        whole: SGLang's metadata of the pass.
        rows: blocks, then queries that select for themselves, R.
        row_of: the row of each query, `[T]`.
        metadata: of the rows, with room for what they select.
    """

    whole: Any
    rows: WholePlan
    row_of: Tensor
    metadata: Any

    @classmethod
    def of(cls, whole: Any, rows: WholePlan) -> EntryPlan:
        """Make the metadata of the first query of each row; that of a block sees what the whole block may select."""
        first = rows.first.long()
        row_of = torch.empty(rows.count, dtype=torch.long, device=first.device)
        numbers = torch.arange(len(first), device=first.device)
        row_of[rows.members] = numbers[: rows.blocks].repeat_interleave(rows.queries)
        row_of[rows.exact] = numbers[rows.blocks :]
        core, indexer = copy(whole.core_metadata), whole.indexer_metadata
        for name in ("c4_sparse_page_indices", "c4_sparse_raw_indices"):
            buffer = getattr(core, name)
            setattr(core, name, None if buffer is None else buffer.new_full((len(first), buffer.shape[1]), -1))
        metadata = copy(whole)
        metadata.core_attn_metadata = core
        metadata.indexer_metadata = replace(
            indexer, page_table=indexer.page_table[first], compressed_seq_lens=indexer.compressed_seq_lens[first]
        )
        return cls(whole, rows, row_of, metadata)

    def spread(self) -> None:
        """Copy what the rows selected to their queries, in SGLang's buffers."""
        found, core = self.metadata.core_metadata, self.whole.core_metadata
        for name in ("c4_sparse_page_indices", "c4_sparse_raw_indices"):
            buffer = getattr(core, name)
            if buffer is not None:
                buffer[: self.rows.count] = getattr(found, name)[self.row_of]


class Leaders:
    """A `C4Indexer` whose index queries and gates are the means of rows; everything else is the indexer's.

    Args:
        indexer: SGLang's.
        rows: the rows of the pass.
    """

    def __init__(self, indexer: Any, rows: WholePlan) -> None:
        self._indexer, self._rows = indexer, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._indexer, name)

    def compute_q(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the queries `[R, H, D]` and gates `[R, H, 1]` of the rows."""
        q, gates = self._indexer.compute_q(*args, **kwargs)
        return mean_queries(q.contiguous(), gates.float().contiguous(), self._rows.first, self._rows.sizes)


class EntryBlocks:
    """Stands on a `DeepseekV4AttnBackend` in the place of its `forward_c4_indexer`; an error in here ends the process.

    Args:
        backend: the backend.
        queries: queries of a block, by model layer.

    Attributes:
        passes: passes in which some layer selected in blocks.
        blocks: blocks that were selected for, summed up over layers.
    """

    def __init__(self, backend: Any, queries: Mapping[int, int]) -> None:
        self.queries, self.passes, self.blocks = dict(queries), 0, 0
        self._backend = backend
        self._signature = inspect.signature(getattr(backend, METHOD))
        self._placed = partial(refusing_around(self._select), getattr(backend, METHOD))
        setattr(backend, METHOD, self._placed)
        setattr(backend, _PLACE, self)

    def stands(self) -> bool:
        """Return whether nothing has replaced it."""
        return vars(self._backend).get(METHOD) is self._placed

    def _select(self, sglangs: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        indexer, backend = given["c4_indexer"], self._backend
        queries = self.queries.get(indexer.layer_id)
        plan = None if queries is None else self._plan(given, queries)
        if plan is None:
            sglangs(*args, **kwargs)
            return
        backend.forward_metadata = plan.metadata
        try:
            sglangs(**given | {"c4_indexer": Leaders(indexer, plan.rows)})
        finally:
            backend.forward_metadata = plan.whole
        plan.spread()
        self.blocks += plan.rows.blocks

    def _plan(self, given: Mapping[str, Any], queries: int) -> EntryPlan | None:
        """Return the plan of a pass, made once for all layers; `None` where SGLang selects for each query."""
        batch, whole = given["forward_batch"], self._backend.forward_metadata
        plans: dict[int, tuple[Any, EntryPlan | None]] = vars(batch).setdefault(_PLANS, {})
        if queries not in plans or plans[queries][0] is not whole:
            rows = self._rows(given, queries, whole)
            plans[queries] = whole, None if rows is None else EntryPlan.of(whole, rows)
            self.passes += rows is not None and sum(kept is whole for kept, plan in plans.values() if plan) == 1
        return plans[queries][1]

    def _rows(self, given: Mapping[str, Any], queries: int, whole: Any) -> WholePlan | None:
        batch, indexer = given["forward_batch"], getattr(whole, "indexer_metadata", None)
        if batch.forward_mode.name != "EXTEND" or indexer is None or indexer.use_prefill_cuda_graph:
            return None
        if given.get("enable_multi_stream"):  # decoding's: rows would have to be ready on another stream
            return None
        lengths = [int(count) for count in batch.extend_seq_lens_cpu]
        prefixes = [int(count) for count in batch.extend_prefix_lens_cpu]
        of_queries = given["x"], given["q_lora"], whole.core_metadata.positions, indexer.compressed_seq_lens
        if {len(item) for item in of_queries} != {sum(lengths)} or indexer.rows_per_request != 1:
            return None
        runs = blocks_of(prefixes, lengths, queries, RATIO * given["c4_indexer"].index_topk)
        return WholePlan.of(runs, lengths, queries, given["x"].device) if runs else None


def placed(backend: Any) -> EntryBlocks | None:
    """Return what stands on a backend.

    Raises:
        ProofError: if something else has replaced it.
    """
    found: EntryBlocks | None = getattr(backend, _PLACE, None)
    if found is not None and not found.stands():
        raise ProofError(f"something has replaced {METHOD} on SGLang's backend, expected what selects in blocks")
    return found
