"""What a search and a comparison found, as it stands in metrics.json and eval.json; reports read nothing else."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results.variant import Kind
from sglang_indexcache import PatternFile


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Measured(_Section):
    """What was measured of a pattern or server on one source; a comparison also says how it changed.

    Attributes:
        loss: a scored token's.
        increase: how much the loss is above the baseline's, paired by sequence.
        accuracy: share of scored tokens that are the likeliest.
        accuracy_change: from the baseline's.
        kl: divergence from the baseline.
        generated: share of a task's answers that the text holds.
        generated_change: from the baseline's.
    """

    loss: Estimate
    increase: Estimate
    accuracy: Estimate
    accuracy_change: Estimate | None = None
    kl: Estimate | None = None
    generated: Estimate | None = None
    generated_change: Estimate | None = None


class Row(_Section):
    """One line of a table: what it is (see `Line`), and what was measured over all sources and on each.

    `extra` is what a study measures of its plans beside their losses, by the title of its column.
    """

    kind: Kind
    name: str
    retention: str | None
    phase: int | None
    full_layers: int | None
    pattern: str | None
    loss: Estimate
    increase: Estimate
    by_source: dict[str, Measured]
    kl: Estimate | None = None
    extra: dict[str, Estimate] | None = None


class HeldOut(_Section):
    """A comparison on held-out data.

    Attributes:
        answer_sources: those where a loss mask picks the tokens that count.
        sha256: of the tokens.
    """

    sources: list[str]
    answer_sources: list[str]
    sequences: int
    scored_tokens: int
    sha256: str
    rows: list[Row]


class StepResult(_Section):
    """A committed flip of `layer`; `candidates` are the losses of flips that ran on all sequences, by layer."""

    layer: int
    full_layers: int
    pattern: str
    loss: float
    increase: Estimate
    candidates: dict[str, float]


class CostResult(_Section):
    """See `evaluator.Cost`; and the layer-tokens of the paper's Algorithm 1 to the same retention."""

    evaluations: int
    sequences: int
    layer_tokens: int
    seconds: float
    algorithm_1_layer_tokens: int
    share_of_algorithm_1: float


class SearchResult(_Section):
    """metrics.json of a search.

    Attributes:
        engine: its name and settings.
        seconds: wall time of each phase of this run; resumed runs only count what they did.
        look_alikes: a line for each pattern that calibration can't tell from the one found.
        overlap: of what layers choose, `[layers, layers]`, None if it was not measured.
        similarity: of attention outputs, likewise.
        shift: of dense models, `[1, layers]`, see `page_signals`.
        recall: of dense models, `[layers, layers]`, likewise.
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

    def as_json(self) -> dict[str, Any]:
        """What is written."""
        content = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {**content, "pattern_file": self.pattern_file.model_dump(mode="json", by_alias=True)}


class ComparisonResult(_Section):
    """eval.json; `findings` has a line for each row, where it is worse than the baseline."""

    schema_: str = Field(alias="schema")
    model: str
    engine: str
    seq_len: int
    held_out: HeldOut
    findings: list[str]

    def as_json(self) -> dict[str, Any]:
        """What is written."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)
