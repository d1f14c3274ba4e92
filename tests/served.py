"""What SGLang's indexers and their metadata are, without SGLang: for tests of what takes the place of a method."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

TOPK, HEADS, DIM, PAGE = 16, 8, 8, 8
PAGED, RAGGED, UNFUSED = "PAGED", "RAGGED", "unfused"


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`[rows, keys]`, of `[rows, heads, dim]`, `[rows, heads, 1]` and `[keys, dim]`."""
    return torch.einsum("tk,tkd->td", weights[..., 0], torch.relu(torch.einsum("thd,kd->thk", q, keys)))


class Backend:
    """SGLang's unfused top-k, in no order."""

    def topk_func(self, score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor) -> Tensor:
        rows = []
        for row, start, length in zip(score, row_starts.tolist(), lengths.tolist(), strict=True):
            best = row[start : start + length].topk(min(topk, length)).indices.sort().values
            rows.append(torch.nn.functional.pad(best.int(), (0, topk - len(best)), value=-1))
        return torch.stack(rows)


class Metadata:
    """Of a forward pass: what SGLang's class says, for requests with a prefix."""

    def __init__(self, prefixes: Sequence[int], lengths: Sequence[int], kind: str) -> None:
        self.totals = totals = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
        bases = [sum(totals[:number]) for number in range(len(totals))]
        rows = [
            (number, bases[number], position)
            for number, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True))
            for position in range(prefix, prefix + length)
        ]
        self.requests, self.starts, positions = (
            torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True)
        )
        self.lengths = positions + 1
        self.topk_backend, self.kind, self.calls = Backend(), kind, 0
        self.force_unfused_topk = kind == UNFUSED
        self.topk_transform_method = SimpleNamespace(name=kind)
        pages = torch.randperm(100 * len(totals)).int().view(len(totals), 100)[:, : -(-max(totals) // PAGE)]
        slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).int().flatten(1)
        offsets = self.starts if kind == RAGGED else None
        self.attn_metadata = SimpleNamespace(topk_indices_offset=offsets, page_table_1=slots, page_size=PAGE)
        self.pages = pages

    def of_rank(self, rank: int, ranks: int) -> tuple[Metadata, Tensor]:
        """What a rank of context parallelism has: every n-th row, and the requests that these are of.

        Returns:
            Its metadata, and which keys, of all requests, it has.
        """
        own, totals = copy(self), self.totals
        kept = sorted(set(self.requests[rank::ranks].tolist()))
        bases = torch.tensor([sum(totals[number] for number in kept[:place]) for place in range(len(kept))])
        own.requests = torch.tensor([kept.index(item) for item in self.requests[rank::ranks].tolist()]).int()
        own.starts, own.lengths = bases.int()[own.requests], self.lengths[rank::ranks]
        own.pages, whole = self.pages[kept], self.attn_metadata
        own.attn_metadata = SimpleNamespace(
            topk_indices_offset=own.starts if self.kind == RAGGED else None,
            page_table_1=whole.page_table_1[kept],
            page_size=PAGE,
        )
        first = [sum(totals[:number]) for number in kept]
        keys = [torch.arange(begin, begin + totals[number]) for begin, number in zip(first, kept, strict=True)]
        return own, torch.cat(keys)

    def get_indexer_kvcache_range(self) -> tuple[Tensor, Tensor]:
        return self.starts, self.starts + self.lengths

    def get_seqlens_expanded(self) -> Tensor:
        return self.lengths

    def get_token_to_batch_idx(self) -> Tensor:
        return self.requests

    def get_page_table_64(self) -> Tensor:
        return self.pages

    def topk_transform(
        self,
        logits: Tensor,
        topk: int,
        ks: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        ke_offset: Tensor | None = None,
        batch_idx_list: Tensor | None = None,
        topk_indices_offset_override: Tensor | None = None,
    ) -> Tensor:
        lengths = self.lengths if ke_offset is None else ke_offset
        chosen = self.topk_backend.topk_func(logits, lengths, topk, torch.zeros_like(lengths) if ks is None else ks)
        if self.kind == UNFUSED:
            return chosen
        if self.kind == RAGGED:
            offset = self.attn_metadata.topk_indices_offset if ke_offset is None else topk_indices_offset_override
            return torch.where(chosen < 0, chosen, chosen + offset[:, None])
        requests = self.requests if ke_offset is None else batch_idx_list
        assert ke_offset is None or cu_seqlens_q.tolist() == [1] * len(logits)
        slots = self.attn_metadata.page_table_1[requests].gather(1, chosen.clamp_min(0).long())
        return torch.where(chosen < 0, chosen, slots)


class SglangIndexer:
    """Selects as SGLang's, for all rows at once or a few at a time.

    Args:
        keys: of all requests, one behind the other.
    """

    index_topk = TOPK
    num_init_tokens = num_local_tokens = 0
    chunk: int | None = None

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.wq_b = SimpleNamespace(weight=keys)

    def _get_topk_paged(
        self, forward_batch: Any, layer_id: int, q_fp8: Tensor, weights: Tensor, metadata: Any
    ) -> Tensor:
        raise NotImplementedError

    def _get_topk_ragged(
        self,
        enable_dual_stream: bool,
        forward_batch: Any,
        layer_id: int,
        q_fp8: Tensor,
        weights: Tensor,
        metadata: Any,
        topk_result: Tensor | None = None,
    ) -> Tensor:
        starts, ends = metadata.get_indexer_kvcache_range()
        scores = index_scores(q_fp8[: len(starts)], weights[: len(starts)], self.keys)
        column = torch.arange(len(self.keys))
        scores[(column < starts[:, None]) | (column >= ends[:, None])] = float("nan")
        if topk_result is None:
            topk_result = torch.full((len(q_fp8), TOPK), -1, dtype=torch.int32)
        if self.chunk is None:
            topk_result[: len(starts)] = metadata.topk_transform(scores, TOPK, ks=starts)
            return topk_result
        offsets, lengths = metadata.attn_metadata.topk_indices_offset, metadata.get_seqlens_expanded()
        for at in range(0, len(starts), self.chunk):
            rows = slice(at, min(at + self.chunk, len(starts)))
            topk_result[rows] = metadata.topk_transform(
                scores[rows],
                TOPK,
                ks=starts[rows],
                cu_seqlens_q=None if offsets is not None else torch.ones(len(scores[rows]), dtype=torch.int32),
                ke_offset=lengths[rows],
                batch_idx_list=None if offsets is not None else metadata.get_token_to_batch_idx()[rows],
                topk_indices_offset_override=None if offsets is None else offsets[rows],
            )
        return topk_result


@dataclass(frozen=True)
class Call:
    """One way in which SGLang 0.5.17 and 0.5.23 call `_get_topk_ragged`.

    Attributes:
        queries: rows of padding behind the queries.
        gates: those behind the gates.
        buffer: those behind the selections in a graph's buffer; `None` where the method makes one.
    """

    queries: int
    gates: int
    buffer: int | None

    def given(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The arguments; padding of rows is what must not be read."""
        q, w = (
            torch.cat([rows, rows.new_full((more, *rows.shape[1:]), torch.nan)])
            for rows, more in ((q, self.queries), (w, self.gates))
        )
        rows = None if self.buffer is None else len(q) - self.queries + self.buffer
        return q, w, None if rows is None else torch.full((rows, TOPK), -1, dtype=torch.int32)


CALLS = {
    "eager": Call(0, 0, None),
    "eager, ranks padded alike": Call(3, 3, None),  # data-parallel attention
    "graph of prompts, fused": Call(0, 0, 5),  # breakable or piecewise: the indexer runs between its parts
    "graph of prompts, unfused": Call(0, 5, 5),  # DeepSeek-V3.2: `q_fp8[:extend_num_tokens]` beside all gates
    "graph of prompts without padding": Call(0, 0, 0),
}


@pytest.fixture
def sglang_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `put_modules`."""
    put_modules(monkeypatch)


def put_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for what is imported: whether selections are given as slots, and the indexer's class."""
    module = ModuleType("sglang.srt.environ")
    module.envs = SimpleNamespace(SGLANG_DSA_FUSE_TOPK=SimpleNamespace(get=lambda: True))  # type: ignore[attr-defined]
    indexer = ModuleType("sglang.srt.layers.attention.dsa.dsa_indexer")
    indexer.Indexer = SglangIndexer  # type: ignore[attr-defined]
    names = [f"sglang.srt{name}" for name in ("", ".layers", ".layers.attention", ".layers.attention.dsa")]
    for found in (*map(ModuleType, ("sglang", *names)), module, indexer):
        monkeypatch.setitem(sys.modules, found.__name__, found)
