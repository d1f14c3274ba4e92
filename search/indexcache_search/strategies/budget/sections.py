"""Sections of latency tables: layers in prompts and decoding steps, the rest of a whole model, and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Difference = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Ranks = Annotated[int, Field(ge=2)]
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
    rest_ms: list[Difference]


class DecodeTimes(TableSection):
    """Milliseconds of an `F` and of an `S` layer in a decoding step of one request, by context."""

    full_ms: list[Milliseconds]
    shared_ms: list[Milliseconds]


class Collectives(TableSection):
    """What the ranks of a model send each other in every layer, by a formula.

    Of n ranks each sends and receives (n - 1) / n of the bytes, at the bus bandwidth that some GPUs reached: an
    all-gather or a reduce-scatter of a tensor counts its bytes, an all-reduce twice as many.

    Attributes:
        ranks: of the model.
        bytes_per_token: of all that a layer sends.
        gb_s: bus bandwidth, 10^9 bytes a second.
        measured_ranks: number of GPUs that reached it.
        step_ms: milliseconds of what a layer sends in a decoding step, as measured on these GPUs.
    """

    ranks: Ranks
    bytes_per_token: Count
    gb_s: Milliseconds
    measured_ranks: Ranks
    step_ms: Milliseconds

    def prompt_ms(self, context: int) -> float:
        """Return the milliseconds of a layer in a prompt of `context` tokens."""
        return (self.ranks - 1) / self.ranks * context * self.bytes_per_token / self.gb_s / 1e6

    def __str__(self) -> str:
        return (
            f"formula: {self.ranks - 1}/{self.ranks} of {self.bytes_per_token:,} bytes a token and layer at"
            f" {self.gb_s:g} GB/s, which {self.measured_ranks} GPUs reached"
        )


class WholeModel(TableSection):
    """What a whole model takes: the times of a table's layers then contain experts.

    Attributes:
        label: what was measured, and what is computed.
        tp: ranks among which the model is divided.
        cp: ranks of these among which the tokens of a prompt are divided.
        layers: of the model.
        dense_layers: those of them, the first ones, that have a dense MLP in the place of experts.
        measured_dense_layers: likewise of the model that was measured.
        shape: keys and values of the model's config.json on which experts depend.
        expert_ms: of a layer's time in a prompt, what comes behind its attention, by context.
        dense_ms: the same of a layer with a dense MLP.
        collectives: what ranks send each other: by a formula, contained in the `measured` times, or `unknown`.
        derived_from: name of the table from which the times were computed; such a table has no checks.
    """

    label: Annotated[str, Field(pattern=r"\S")]
    tp: Count
    cp: Count = 1
    layers: Count
    dense_layers: Annotated[int, Field(ge=0)]
    measured_dense_layers: Annotated[int, Field(ge=0)]
    shape: dict[str, int]
    expert_ms: list[Milliseconds]
    dense_ms: list[Milliseconds]
    collectives: Collectives | Literal["measured", "unknown"]
    derived_from: str | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.dense_layers > self.layers:
            raise ValueError(f"found {self.dense_layers} dense layers of {self.layers}")
        if self.tp % self.cp:
            raise ValueError(f"cp {self.cp} does not divide tp {self.tp}")
        if isinstance(self.collectives, Collectives) and self.collectives.ranks != self.tp:
            raise ValueError(f"collectives are of {self.collectives.ranks} ranks, expected {self.tp}, as tp")
        return self

    @property
    def sent(self) -> Collectives | None:
        """The formula of what ranks send each other; `None` if layer times contain it, or it is unknown."""
        return self.collectives if isinstance(self.collectives, Collectives) else None

    def dense_more_ms(self) -> Sequence[float]:
        """Return by how much a layer with a dense MLP takes longer than one with experts, by context."""
        return [dense - experts for dense, experts in zip(self.dense_ms, self.expert_ms, strict=True)]

    def __str__(self) -> str:
        where = f"TP {self.tp}" + (f", CP {self.cp}" if self.cp > 1 else "")
        computed = "" if self.derived_from is None else f", computed from {self.derived_from}"
        return (
            f"whole model of {self.layers} layers on {where}{computed}: {self.label}; what ranks send:"
            f" {self.collectives}"
        )


class Check(TableSection):
    """A whole prompt of a pattern as measured, and as the table has it; `plain_ms` is SGLang's without a pattern."""

    pattern: str
    context: Count
    measured_ms: Milliseconds
    expected_ms: Milliseconds
    plain_ms: Milliseconds
    spread: float
