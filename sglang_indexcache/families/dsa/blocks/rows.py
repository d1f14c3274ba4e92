"""SGLang's method that selects for all queries of a prefill, replaced by ones that hand it some rows at a time.

Read: dsa_indexer.py and dsa_indexer_metadata.py in sglang/srt/layers/attention/dsa of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from types import MethodType, SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from sglang_indexcache.families.dsa.blocks.context import ONE_RANK, Context
from sglang_indexcache.families.dsa.blocks.shards import ALONE, Shards
from sglang_indexcache.families.dsa.needs import PREFILL
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.sglang.hooks import refusing_around

_REQUESTS, _PART, _KEYS = "_indexcache_requests", "_indexcache_part", "_indexcache_keys"


class Prefill:
    """The arguments of one call of `Indexer._get_topk_ragged`, for rows of it.

    Rows of padding may stand behind those of the requests: of queries and gates alike where data-parallel ranks have
    prompts of different lengths, of gates alone where a graph of prompts runs an indexer that is not fused.

    Args:
        sglangs: the method.
        arguments: by name.
        context: which rows are on this rank.

    Attributes:
        count: rows of all requests that are on this rank, T.
        queries: `[T, heads, dim]`.
        gates: `[T, heads, 1]`.

    Raises:
        ProofError: if there are fewer rows than the requests have, so that they are some of the rows.
    """

    def __init__(self, sglangs: Callable[..., Tensor], arguments: dict[str, Any], context: Context = ONE_RANK) -> None:
        self._sglangs, self._arguments, self.context = sglangs, arguments, context
        self.metadata, self.forward_batch = arguments["metadata"], arguments["forward_batch"]
        self.count = context.count(sum(self.lengths))
        queries, gates = arguments["q_fp8"], arguments["weights"]
        if min(len(queries), len(gates)) < self.count:
            raise ProofError(
                f"SGLang selects for {len(queries)} queries with {len(gates)} gates at once, expected at least the"
                f" {self.count} of all requests"
            )
        self.queries: Tensor = queries[: self.count]
        self.gates: Tensor = gates[: self.count]

    def all(self) -> Tensor:
        """Select for all rows, as SGLang does."""
        return self._sglangs(**self._arguments)

    def select(self, queries: Tensor, gates: Tensor, rows: RowsMetadata) -> Tensor:
        """Select for other queries, `[rows, heads, dim]`, with gates `[rows, heads, 1]`; `[rows, index_topk]`."""
        changes = {"q_fp8": queries, "weights": gates, "metadata": rows, "topk_result": None}
        return self._sglangs(**self._arguments | changes)

    def result(self, index_topk: int) -> Tensor:
        """Return what to write the selections of all rows to: SGLang's buffer, or a new one; -1 for padding."""
        given: Tensor | None = self._arguments.get("topk_result")
        if given is not None:
            return given
        rows = len(self._arguments["q_fp8"])
        made = torch.empty((rows, index_topk), device=self.queries.device, dtype=torch.int32)
        if self.count < rows:
            made[self.count :] = -1
        return made

    @property
    def layer(self) -> int:
        """The layer that selects."""
        return int(self._arguments["layer_id"])

    @property
    def kept(self) -> dict[str, Any]:
        """Values that all layers of a forward pass share, by name."""
        made: dict[str, Any] = vars(self.forward_batch)
        return made

    @property
    def lengths(self) -> list[int]:
        """Rows of each request, on all ranks."""
        return [int(count) for count in self.forward_batch.extend_seq_lens_cpu]

    @property
    def prefixes(self) -> list[int]:
        """Tokens of each request that were read before."""
        return [int(count) for count in self.forward_batch.extend_prefix_lens_cpu]

    @property
    def keys(self) -> float:
        """Keys that a row may select, in the mean; computed once for all layers of a forward pass."""
        if _KEYS not in self.kept:
            lengths = self.lengths
            each = zip(self.prefixes, lengths, strict=True)
            self.kept[_KEYS] = sum(length * (prefix + length / 2) for prefix, length in each) / max(1, sum(lengths))
        found: float = self.kept[_KEYS]
        return found

    def requests(self) -> Tensor:
        """Return the number of each row's request, made once for all layers of a forward pass."""
        if _REQUESTS not in self.kept:
            lengths = torch.tensor(self.lengths)
            requests = torch.arange(len(lengths)).repeat_interleave(lengths)
            self.kept[_REQUESTS] = requests.to(self.queries.device, non_blocking=True)
        found: Tensor = self.kept[_REQUESTS]
        return found


class PrefillSelection:
    """A replacement of an F layer's `Indexer._get_topk_ragged`; an error in here ends the process.

    Args:
        indexer: SGLang's.
        shards: this rank's part of the rows.
        ranks: those of context parallelism, over which SGLang has shared out the rows.
    """

    def __init__(self, indexer: Any, shards: Shards = ALONE, ranks: Context = ONE_RANK) -> None:
        self.indexer, self.shards, self.ranks = indexer, shards, ranks
        self._sglangs = MethodType(getattr(type(indexer), PREFILL), indexer)
        self._signature, self._guarded = inspect.signature(self._sglangs), refusing_around(self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Select as SGLang's method does: `[rows, index_topk]`, int32, in its index space, -1 for none."""
        selected: Tensor = self._guarded(self._sglangs, *args, **kwargs)
        return selected

    def _call(self, sglangs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        return self._select(Prefill(sglangs, arguments, self.ranks.of(arguments["forward_batch"])))

    def _select(self, prefill: Prefill) -> Tensor:
        """Select for all rows of a prefill, each for itself."""
        if not self.shards.pays(prefill.count, prefill.keys):
            return prefill.all()
        part = self.shards.part(prefill.count, prefill.queries.device, prefill.kept)
        if _PART not in prefill.kept:
            prefill.kept[_PART] = RowsMetadata(prefill.metadata, part.own, prefill.requests()[part.own])
        rows = prefill.kept[_PART].over(prefill.metadata)
        chosen = prefill.select(take(prefill.queries, part.own), prefill.gates[part.own], rows)
        result = prefill.result(self.indexer.index_topk)
        result[: prefill.count] = self.shards.exchange(chosen, part)
        return result


class RowsMetadata:
    """A `DSAIndexerMetadata` for some `rows` of `requests`; all that does not depend on rows is the full metadata's.

    Attributes:
        starts: the first key that each row may select, among those of all requests.
        ends: the key after the last one.
        lengths: number of tokens that each row may select.
        offsets: what SGLang adds to the positions of each row; `None` where it reads a page table.
    """

    def __init__(self, metadata: Any, rows: Tensor, requests: Tensor) -> None:
        offsets = metadata.attn_metadata.topk_indices_offset
        self.metadata, self.requests = metadata, requests
        self.starts, self.ends = (keys[rows] for keys in metadata.get_indexer_kvcache_range())
        self.lengths: Tensor = metadata.get_seqlens_expanded()[rows]
        self.offsets: Tensor | None = None if offsets is None else offsets[rows]
        self.attn_metadata = SimpleNamespace(topk_indices_offset=self.offsets)

    def over(self, metadata: Any) -> Self:
        """Return the same rows over the metadata of another layer of the pass."""
        other = copy(self)
        other.metadata = metadata
        return other

    def __getattr__(self, name: str) -> Any:
        if name == "metadata":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.metadata, name)

    def get_indexer_kvcache_range(self) -> tuple[Tensor, Tensor]:
        """Return the first and the last key that each row may select, among those of all requests."""
        return self.starts, self.ends

    def get_seqlens_expanded(self) -> Tensor:
        """Return the number of tokens that each row may select."""
        return self.lengths

    def get_token_to_batch_idx(self) -> Tensor:
        """Return the number of each row's request."""
        return self.requests

    def topk_transform(self, logits: Tensor, topk: int, **given: Any) -> Tensor:
        """Select like the full metadata's method, which without `ke_offset` assumes all rows, for these rows only."""
        if given.get("ke_offset") is None:
            given["ke_offset"] = self.lengths
            if self.offsets is not None:
                given["topk_indices_offset_override"] = self.offsets
            else:
                given["cu_seqlens_q"] = torch.ones(len(logits), dtype=torch.int32, device=logits.device)
                given["batch_idx_list"] = self.requests
        selected: Tensor = self.metadata.topk_transform(logits, topk, **given)
        return selected


def take(values: Tensor, rows: Tensor) -> Tensor:
    """Return `values[rows]`, also for fp8, which has no indexing."""
    return values.view(torch.uint8)[rows].view(values.dtype) if values.itemsize == 1 else values[rows]
