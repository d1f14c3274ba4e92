"""Latency tables: measured times, a file each; `scripts.bench.serving.prices` makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from indexcache_search.errors import SearchError
from indexcache_search.evaluation.identity import Place
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.strategies.budget.sections import (
    Check,
    Count,
    DecodeTimes,
    PromptTimes,
    TableSection,
    WholeModel,
)
from sglang_indexcache import ModelLayers
from sglang_indexcache.families import family_of
from sglang_indexcache.io.atomic import read_json_object, read_regular
from sglang_indexcache.io.errors import FileError

TABLES = Path(__file__).with_name("tables")
MOST_BYTES = 1 << 20
WHOLE = "indexcache-prices/v2"


class LatencyTable(TableSection):
    """Times of one model's shape on one device.

    Tables of `indexcache-prices/v1` have times of layers alone, with a small dense MLP on one rank; those of v2 say
    what a whole model takes.

    Attributes:
        name: what the shape is.
        device: name of the GPU.
        versions: of the software.
        date: when it was measured.
        heads: attention heads of a tensor-parallel rank.
        index_heads: heads of the indexer.
        index_topk: tokens that each query selects.
        index_head_dim: dimensions of a head of the indexer; like the next two, SGLang's kernels take no others.
        kv_lora_rank: dimensions of a cached key without its rotary part.
        qk_rope_head_dim: dimensions of that part.
        kv_cache_dtype: data type of cached keys.
        chunk: tokens of a prompt's chunk.
        layers: layers of the model that was measured.
        contexts: tokens of the prompts, rising.
        prompt: times of a prompt.
        decode: times of a decoding step behind it.
        whole: what a whole model takes; in tables of v2 alone.
        checks: whole prompts to compare with.
        notes: what else a reader must know.
    """

    schema_: Literal["indexcache-prices/v1", "indexcache-prices/v2"] = Field(alias="schema")
    name: str
    device: str
    versions: dict[str, str]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    heads: Count
    index_heads: Count
    index_topk: Count
    index_head_dim: Count = 128
    kv_lora_rank: Count = 512
    qk_rope_head_dim: Count = 64
    kv_cache_dtype: str
    chunk: Count
    layers: Count
    contexts: Annotated[list[Count], Field(min_length=1)]
    prompt: PromptTimes
    decode: DecodeTimes
    whole: WholeModel | None = None
    checks: list[Check] = Field(default_factory=list)
    notes: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        prompt, decode, whole = self.prompt, self.decode, self.whole
        if any(first >= second for first, second in pairwise(self.contexts)):
            raise ValueError("contexts do not rise")
        if 1 not in prompt.full_ms or set(prompt.full_ms) != set(prompt.shared_ms):
            raise ValueError("full_ms and shared_ms need the same blocks, 1 among them")
        rows = [*prompt.full_ms.values(), *prompt.shared_ms.values(), prompt.rest_ms, decode.full_ms, decode.shared_ms]
        rows += [] if whole is None else [whole.expert_ms, whole.dense_ms]
        if any(len(row) != len(self.contexts) for row in rows):
            raise ValueError(f"found a row of another length, expected {len(self.contexts)} times in each")
        if (self.schema_ == WHOLE) != (whole is not None):
            raise ValueError(f"whole is {'missing' if whole is None else 'there'}, and the schema {self.schema_}")
        if whole is not None:
            shortest = map(min, *prompt.full_ms.values(), *prompt.shared_ms.values())
            if any(experts >= layer for experts, layer in zip(whole.expert_ms, shortest, strict=True)):
                raise ValueError("expert_ms of whole is no part of a layer's time")
            if whole.measured_dense_layers > self.layers:
                raise ValueError(f"found {whole.measured_dense_layers} dense layers of {self.layers}")
            if whole.derived_from is not None and self.checks:
                raise ValueError("checks are there, of times that were computed from another table")
        return self

    @classmethod
    def load(cls, name: str) -> LatencyTable:
        """Read the table of this name that the package brings, or a file.

        Raises:
            SearchError: if there is none, or the file is no table.
        """
        path = TABLES / f"{name}.json" if name in known() else Path(name)
        try:
            read_json_object(path, MOST_BYTES)  # says what a file holds instead of JSON
            return cls.model_validate_json(read_regular(path, MOST_BYTES))
        except FileError as error:
            hint = "" if path.is_file() else f"; expected a file or one of {', '.join(known())}"
            raise SearchError(f"prices: {error}{hint}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise SearchError(f"prices: {name}: {where}: {first['msg'].removeprefix('Value error, ')}") from None

    @property
    def largest_error(self) -> float | None:
        """Largest error of the table for whole prompts, as a share; `None` if none were measured."""
        return max((abs(check.expected_ms / check.measured_ms - 1) for check in self.checks), default=None)

    def unlike(self, model: ModelLayers) -> str:
        """Say in what a model is not of this table's shape, so that its layers take other times; empty if in nothing.

        The number of layers may differ, since each is timed alone, and so may the heads, if whole ranks have as many.
        """
        facts = {**family_of(model.architecture).checkpoint.keys[model.architecture].defaults, **model.config}
        facts["index_topk"] = model.index_topk  # of models that are made in memory too
        heads, lines = facts.get("num_attention_heads", 0), list[str]()
        if not heads or heads % self.heads:
            lines.append(f"{heads} attention heads, not {self.heads} a rank")
        for key, ours in (
            ("index_n_heads", self.index_heads),
            ("index_topk", self.index_topk),
            ("index_head_dim", self.index_head_dim),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            *({} if self.whole is None else self.whole.shape).items(),
        ):
            if facts.get(key) != ours:
                lines.append(f"{key} {facts.get(key)}, not {ours}")
        return ", ".join(lines)

    def elsewhere(self, place: Place) -> str:
        """Say in what a place is not the one where these times were measured; empty if in nothing that is known."""
        lines = [] if place.device in (None, self.device) else [f"{place.device}, not {self.device}"]
        ours = self.versions.get("sglang")
        if None not in (place.sglang, ours) and place.sglang != ours:
            lines.append(f"SGLang {place.sglang}, not {ours}")
        return ", ".join(lines)

    def at(self, context: int) -> Prices:
        """Return latencies for prompts of `context` tokens, of a whole model where the table has them.

        Between the measured contexts a power law holds.

        Raises:
            SearchError: if so many were not measured.
        """
        prices, whole = self.as_measured(context), self.whole
        if whole is None:
            return prices
        sent = whole.sent
        prompt, step = (0.0, 0.0) if sent is None else (sent.prompt_ms(context), sent.step_ms)
        more = (whole.dense_layers - whole.measured_dense_layers) * self._between(whole.dense_more_ms(), context)
        return replace(
            prices,
            full={queries: each + prompt for queries, each in prices.full.items()},
            shared={queries: each + prompt for queries, each in prices.shared.items()},
            rest=prices.rest + more,
            decode_full=prices.decode_full + step,
            decode_shared=prices.decode_shared + step,
        )

    def as_measured(self, context: int) -> Prices:
        """Return latencies of the model that was measured, see `at`: checks are of them."""
        first, last = self.contexts[0], self.contexts[-1]
        if not first <= context <= last:
            raise SearchError(
                f"{context} tokens are outside of the latency table {self.name}, expected {first} to {last}"
            )

        def power(row: Sequence[float]) -> float:
            return math.exp(self._between([math.log(value) for value in row], context))

        def blocks(rows: Mapping[int, Sequence[float]]) -> dict[int, float]:
            return {queries: power(row) for queries, row in sorted(rows.items())}

        whole, rest = self.whole, self._between(self.prompt.rest_ms, context)
        if whole is not None:
            rest += whole.measured_dense_layers * self._between(whole.dense_more_ms(), context)
        return Prices(
            table=self.name,
            words=str(self),
            context=context,
            full=blocks(self.prompt.full_ms),
            shared=blocks(self.prompt.shared_ms),
            rest=rest,
            decode_full=power(self.decode.full_ms),
            decode_shared=power(self.decode.shared_ms),
            whole=whole is not None,
        )

    def _between(self, row: Sequence[float], context: int) -> float:
        """Return a value of `row` at `context`, linear in its logarithm between the measured ones."""
        place = next(number for number, item in enumerate(self.contexts) if item >= context)
        if self.contexts[place] == context:
            return row[place]
        low, high = self.contexts[place - 1], self.contexts[place]
        part = math.log(context / low) / math.log(high / low)
        return row[place - 1] * (1 - part) + row[place] * part

    def __str__(self) -> str:
        whole = "layers alone, without experts and all-reduces" if self.whole is None else self.whole
        return (
            f"{self.name} ({self.heads} heads a rank, {self.index_heads} index heads, index_topk {self.index_topk},"
            f" {self.kv_cache_dtype};"
            f" {self.device}, SGLang {self.versions.get('sglang', '?')}, {self.date}; {whole})"
        )


def known() -> list[str]:
    """Return the names of the package's tables."""
    return sorted(path.stem for path in TABLES.glob("*.json"))
