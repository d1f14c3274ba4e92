"""Results of a search and a comparison as in metrics.json and eval.json, the only input of reports."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results.variant import NAMED, Kind, own_names
from sglang_indexcache import PatternFile


class ResultSection(BaseModel):
    """A part of a result, frozen; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class SourceResult(ResultSection):
    """Measurements of a pattern or server on one source; a comparison adds changes from the baseline.

    Attributes:
        loss: mean of a scored token.
        increase: loss above the baseline's, paired by sequence.
        accuracy: share of scored tokens that are the likeliest.
        accuracy_change: change from the baseline.
        kl: divergence from the baseline.
        generated: share of a task's answers found in the generated text.
        generated_change: change from the baseline.
    """

    loss: Estimate
    increase: Estimate
    accuracy: Estimate
    accuracy_change: Estimate | None = None
    kl: Estimate | None = None
    generated: Estimate | None = None
    generated_change: Estimate | None = None


class Row(ResultSection):
    """One line of a table: its variant (see `Variant`), and measurements over all sources and on each.

    `served` is how a server is told to run the pattern, as it was named; see `Variant`.

    `extra` holds further measurements of a study's plans, by column title; `prefill` is the prefill time relative
    to the baseline's, by `HeldOut.prices`.
    """

    kind: Kind
    name: str
    retention: str | None
    phase: int | None
    full_layers: int | None
    pattern: str | None
    loss: Estimate
    increase: Estimate
    by_source: dict[str, SourceResult]
    kl: Estimate | None = None
    extra: dict[str, Estimate] | None = None
    prefill: float | None = None
    served: str | None = None


class PricesResult(ResultSection):
    """The latency table that was used: its name, tokens of a prompt, and in words what was measured.

    `baseline_ms` is the baseline's time of such a prompt, if the table is of whole models.
    """

    table: str
    context: int
    words: str
    baseline_ms: float | None = None


class HeldOut(ResultSection):
    """A comparison on held-out data.

    Attributes:
        answer_sources: sources with a loss mask.
        sha256: digest of the tokens.
        prices: by which the rows' `prefill` was reckoned; `None` for models without a latency table.
    """

    sources: list[str]
    answer_sources: list[str]
    sequences: int
    scored_tokens: int
    sha256: str
    rows: list[Row]
    prices: PricesResult | None = None


class Spread(ResultSection):
    """The median over turns, with the smallest and the largest turn; of an estimate the value alone.

    Of a gain: the ratio of the medians, and an interval from the ratios of the turns (the median's, of the sign test).
    """

    median: float
    low: float | None = None
    high: float | None = None


class GainResult(ResultSection):
    """Speed as a multiple of the baseline's: `first_token` and `token` by time, `throughput` by tokens a second."""

    first_token: Spread
    token: Spread | None = None
    throughput: Spread | None = None


class SpeedRow(ResultSection):
    """Speed of a pattern or server with prompts of one length.

    Attributes:
        name: as of the row of `held_out`, like `retention`.
        context: tokens of a prompt.
        concurrency: requests at once.
        output_tokens: tokens generated behind each prompt; `None` of an estimate.
        turns: rounds in which all were timed; `None` of an estimate.
        first_token_ms: TTFT; in a turn with several requests their median.
        token_ms: time of each later token, likewise.
        tokens_per_second: generated tokens of all requests, by the time until the last one.
        first_token_percentiles: of all requests of all turns, `"90"` and `"99"`, where several run at once.
        gain: over the baseline, paired by turn; the baseline has none.
        source: how it is known.
        basis: what an estimate is from, or under which conditions was measured.
    """

    name: str
    retention: str | None
    context: int
    concurrency: int
    output_tokens: int | None
    turns: int | None
    first_token_ms: Spread
    token_ms: Spread | None = None
    tokens_per_second: Spread | None = None
    first_token_percentiles: dict[str, float] | None = None
    gain: GainResult | None = None
    source: Literal["measured", "estimated"]
    basis: str


class StepResult(ResultSection):
    """Committed flip of `layer`; `candidates` are the losses of flips run on all sequences, by layer."""

    layer: int
    full_layers: int
    pattern: str
    loss: float
    increase: Estimate
    candidates: dict[str, float]


class CostResult(ResultSection):
    """See `evaluator.Cost`; also the layer-tokens of the paper's Algorithm 1 to the same retention."""

    evaluations: int
    sequences: int
    layer_tokens: int
    seconds: float
    algorithm_1_layer_tokens: int
    share_of_algorithm_1: float


class SearchResult(ResultSection):
    """Contents of a search's metrics.json.

    Attributes:
        engine: its name and settings.
        seconds: wall time of each phase of this run; resumed runs count only their own.
        look_alikes: a line for each pattern that calibration can't distinguish from the one found.
        overlap: overlap of selections, `[layers, layers]`; `None` if it was not measured.
        similarity: similarity of attention outputs, `[layers, layers]`; `None` if it was not measured.
        shift: `[1, layers]`, for dense models, see `page_signals`.
        recall: `[layers, layers]`, for dense models, see `page_signals`.
        weights_sha256: digest of the model's files, see `Engine`; empty for a model in memory.
        command: the command line, without secrets; `None` where there was none.
        speed: times of prompts on a calibration server; absent where an engine measures none.
    """

    schema_: str = Field(alias="schema")
    pattern_file: PatternFile
    engine: dict[str, str]
    seconds: dict[str, float]
    cost: CostResult
    steps: list[StepResult]
    held_out: HeldOut
    look_alikes: list[str]
    overlap: list[list[float]] | None
    similarity: list[list[float]] | None = None
    shift: list[list[float]] | None = None
    recall: list[list[float]] | None = None
    weights_sha256: str | None = None
    command: str | None = None
    speed: list[SpeedRow] = []

    @property
    def found(self) -> list[Row]:
        """The rows of the patterns that the search found."""
        search = self.pattern_file.search
        assert search is not None
        return [row for row in self.held_out.rows if row.kind == NAMED and row.name in own_names(search.strategy)]

    def as_json(self) -> dict[str, Any]:
        """Return the contents to write."""
        content = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {**content, "pattern_file": self.pattern_file.model_dump(mode="json", by_alias=True)}


class ComparisonResult(ResultSection):
    """Contents of eval.json.

    Attributes:
        findings: lines that say where a row is worse than the baseline.
        speed: of each row, as far as it was requested and is known; absent where it was not requested.
    """

    schema_: str = Field(alias="schema")
    model: str
    engine: str
    seq_len: int
    held_out: HeldOut
    findings: list[str]
    speed: list[SpeedRow] = []

    def as_json(self) -> dict[str, Any]:
        """Return the contents to write."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)
