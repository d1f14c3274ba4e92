"""Latency tables: measured times, a file each; `scripts.bench.serving.prices` makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from indexcache_search.errors import SearchError
from indexcache_search.evaluation.identity import Place
from indexcache_search.strategies.budget.layers import Prices
from sglang_indexcache import ModelLayers
from sglang_indexcache.families import family_of
from sglang_indexcache.io.atomic import read_json_object, read_regular
from sglang_indexcache.io.errors import FileError

TABLES = Path(__file__).with_name("tables")
MOST_BYTES = 1 << 20

Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Blocks = dict[Count, list[Milliseconds]]


class TableSection(BaseModel):
    """A part of a table, frozen; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptTimes(TableSection):
    """Milliseconds of a layer in prompts, by context.

    Attributes:
        full_ms: of an `F` layer, by the number of queries for which it selects at a time.
        shared_ms: of an `S` layer behind such a selection.
        rest_ms: what a prompt takes beside its layers; within the errors of the others it may be negative.
    """

    full_ms: Blocks
    shared_ms: Blocks
    rest_ms: list[Annotated[float, Field(allow_inf_nan=False)]]


class DecodeTimes(TableSection):
    """Milliseconds of an `F` and of an `S` layer in a decoding step of one request, by context."""

    full_ms: list[Milliseconds]
    shared_ms: list[Milliseconds]


class Check(TableSection):
    """A whole prompt of a pattern as measured, and as the table has it; `plain_ms` is SGLang's without a pattern."""

    pattern: str
    context: Count
    measured_ms: Milliseconds
    expected_ms: Milliseconds
    plain_ms: Milliseconds
    spread: float


class LatencyTable(TableSection):
    """Times of one model's shape on one device.

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
        checks: whole prompts to compare with.
        notes: what else a reader must know.
    """

    schema_: Literal["indexcache-prices/v1"] = Field(alias="schema")
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
    checks: list[Check] = []
    notes: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        prompt, decode = self.prompt, self.decode
        if any(first >= second for first, second in pairwise(self.contexts)):
            raise ValueError("contexts do not rise")
        if 1 not in prompt.full_ms or set(prompt.full_ms) != set(prompt.shared_ms):
            raise ValueError("full_ms and shared_ms need the same blocks, 1 among them")
        rows = [*prompt.full_ms.values(), *prompt.shared_ms.values(), prompt.rest_ms, decode.full_ms, decode.shared_ms]
        if any(len(row) != len(self.contexts) for row in rows):
            raise ValueError(f"found a row of another length, expected {len(self.contexts)} times in each")
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
        """Return latencies for prompts of `context` tokens; between the measured ones a power law holds.

        Raises:
            SearchError: if so many were not measured.
        """
        first, last = self.contexts[0], self.contexts[-1]
        if not first <= context <= last:
            raise SearchError(
                f"{context} tokens are outside of the latency table {self.name}, expected {first} to {last}"
            )

        def power(row: Sequence[float]) -> float:
            return math.exp(between([math.log(value) for value in row]))

        def between(row: Sequence[float]) -> float:
            place = next((number for number, item in enumerate(self.contexts) if item >= context), 0)
            if place == 0 or self.contexts[place] == context:
                return row[place]
            low, high = self.contexts[place - 1], self.contexts[place]
            part = math.log(context / low) / math.log(high / low)
            return row[place - 1] * (1 - part) + row[place] * part

        def blocks(rows: Mapping[int, Sequence[float]]) -> dict[int, float]:
            return {queries: power(row) for queries, row in sorted(rows.items())}

        return Prices(
            table=self.name,
            words=str(self),
            context=context,
            full=blocks(self.prompt.full_ms),
            shared=blocks(self.prompt.shared_ms),
            rest=between(self.prompt.rest_ms),
            decode_full=power(self.decode.full_ms),
            decode_shared=power(self.decode.shared_ms),
        )

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.heads} heads a rank, {self.index_heads} index heads, index_topk {self.index_topk},"
            f" {self.kv_cache_dtype};"
            f" {self.device}, SGLang {self.versions.get('sglang', '?')}, {self.date})"
        )


def known() -> list[str]:
    """Return the names of the package's tables."""
    return sorted(path.stem for path in TABLES.glob("*.json"))
