"""metrics.json of a finished search, and tables of what was measured on held-out data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Engine, Losses
from indexcache_search.evaluation import estimates
from indexcache_search.results.held_out import (
    CostResult,
    HeldOut,
    PricesResult,
    Row,
    SearchResult,
    SourceResult,
    SpeedRow,
    StepResult,
)
from indexcache_search.results.names import suffix
from indexcache_search.results.variant import BASELINE, BEST, MEAN, PHASE, Variant
from indexcache_search.searching.comparison import VariantLosses
from indexcache_search.searching.search import Found
from indexcache_search.strategies.budget.layers import Prices
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.pattern.selection import PatternSelection

SCHEMA = "indexcache-search/metrics/v3"


def collect(
    found: Found,
    file: PatternFile,
    engine: Engine,
    table: HeldOut,
    matrices: Mapping[str, NDArray[np.float64] | None],
    seconds: Mapping[str, float],
    speed: Sequence[SpeedRow] = (),
) -> SearchResult:
    """Collect the result of a finished search.

    Args:
        found: its outcome.
        file: the pattern file made of it.
        engine: the one that evaluated.
        table: the held-out comparison.
        matrices: `overlap` and `similarity`, `[layers, layers]`; `None` if not measured.
        seconds: wall time of each phase of this run.
        speed: rows of speed, if the engine measures it.
    """
    more: dict[str, Any] = {name: None if item is None else item.round(4).tolist() for name, item in matrices.items()}
    if speed:
        more["speed"] = list(speed)
    return SearchResult(
        schema=SCHEMA,
        pattern_file=file,
        engine={"name": engine.name, **engine.settings},
        weights_sha256=engine.weights_sha256,
        seconds={name: round(value, 1) for name, value in seconds.items()},
        cost=CostResult(
            **{**asdict(found.cost), "seconds": round(found.cost.seconds, 1)},
            algorithm_1_layer_tokens=found.algorithm_1,
            share_of_algorithm_1=found.cost.layer_tokens / max(found.algorithm_1, 1),
        ),
        steps=_steps(found),
        held_out=table,
        look_alikes=[str(item) for item in found.look_alikes],
        **more,
    )


def _steps(found: Found) -> list[StepResult]:
    return [
        StepResult(
            layer=step.layer,
            full_layers=len(step.pattern.full_layers),
            pattern=step.pattern.roles,
            loss=step.loss,
            increase=found.increases[step.pattern],
            candidates={str(layer): value for layer, value in step.losses.items()},
        )
        for step in found.steps
    ]


def held_out(
    rows: Sequence[VariantLosses], data: TokenSet, first_sparse_position: int, prices: Prices | None
) -> HeldOut:
    """Tabulate the held-out comparison: every pattern, and uniform's mean and best over its phases."""
    baseline = next(row.evaluation for row in rows if row.line.kind == BASELINE)
    table = [
        Row(**described(row.line), **_speed(row.line, rows[0].line, prices), **_measure(row.evaluation, baseline, data))
        for row in rows
    ]
    uniform = [row for row in rows if row.line.kind == PHASE]
    selections = [_group(row)[1] for row in uniform]
    for group in dict.fromkeys(map(_group, uniform)):
        phases = [row for row in uniform if _group(row) == group]
        if len(phases) > 1:
            more = suffix(group[1], selections)
            table += _phase_summaries(phases, baseline, data, more, rows[0].line, prices)
    return HeldOut(
        sources=list(data.sources),
        answer_sources=_answer_sources(data, first_sparse_position),
        sequences=data.num_sequences,
        scored_tokens=data.scored_tokens,
        sha256=data.sha256,
        rows=table,
        prices=None if prices is None else PricesResult(table=prices.table, context=prices.context, words=prices.words),
    )


def described(line: Variant) -> dict[str, Any]:
    """Return the columns of a `results.Row` that identify it."""
    plan = line.pattern
    return {
        "kind": line.kind,
        "name": line.name,
        "retention": None if line.retention is None else str(line.retention),
        "phase": line.phase,
        "full_layers": len(plan.full_layers) if isinstance(plan, Pattern) else None,
        "pattern": None if plan is None else str(plan),
        **({} if line.served is None else {"served": line.served}),
    }


def _speed(line: Variant, baseline: Variant, prices: Prices | None) -> dict[str, Any]:
    """Return the column of a `results.Row` that is reckoned, where the pattern has a price."""
    pattern, native = line.pattern, baseline.pattern
    if prices is None or not isinstance(pattern, Pattern) or not isinstance(native, Pattern):
        return {}
    if set(pattern.queries.values()) - set(prices.full):
        return {}
    return {"prefill": round(prices.prompt_share(pattern, native), 4)}


def _answer_sources(data: TokenSet, first_sparse_position: int) -> list[str]:
    """Return the sources whose loss mask picks the tokens that count: questions with answers, not running text."""
    all_counted = np.asarray(data.scored[:, first_sparse_position + 1 :].all(axis=1))
    return [name for number, name in enumerate(data.sources) if not all_counted[data.source_of == number].all()]


def _group(row: VariantLosses) -> tuple[Fraction | None, PatternSelection | None]:
    """Summarise uniform's phases."""
    return row.line.retention, row.line.pattern.selection if isinstance(row.line.pattern, Pattern) else None


def _phase_summaries(
    phases: Sequence[VariantLosses], baseline: Losses, data: TokenSet, more: str, native: Variant, prices: Prices | None
) -> list[Row]:
    """Mean over phases (its standard error is over sequences: the phases are all there are), and the best phase."""
    count, first = len(phases), phases[0]
    losses = tuple(math.fsum(column) / count for column in zip(*(row.evaluation.losses for row in phases), strict=True))
    mean = replace(first.evaluation, losses=losses)
    correct = np.mean([row.evaluation.correct for row in phases], axis=0)
    best = min(phases, key=lambda row: estimates.loss(row.evaluation, data).mean)
    over_all = described(Variant(MEAN, f"uniform, mean of {count} phases{more}", first.line.retention, None))
    over_all["full_layers"] = described(first.line)["full_layers"]
    over_all |= _speed(first.line, native, prices)  # the same at all phases, unless layers are locked
    best_line = replace(best.line, kind=BEST, name=f"uniform, best phase{more}")
    return [
        Row(**over_all, **_measure(mean, baseline, data, correct)),
        Row(**described(best_line), **_speed(best.line, native, prices), **_measure(best.evaluation, baseline, data)),
    ]


def _measure(
    evaluation: Losses, baseline: Losses, data: TokenSet, correct: NDArray[np.float64] | None = None
) -> dict[str, Any]:
    """Return the columns of a `results.Row` that were measured."""
    hits = np.asarray(evaluation.correct, np.float64) if correct is None else correct
    return {
        "loss": estimates.loss(evaluation, data),
        "increase": estimates.increase(evaluation, baseline, data),
        "by_source": {
            name: SourceResult(
                loss=estimates.loss(evaluation, data, number),
                increase=estimates.increase(evaluation, baseline, data, number),
                accuracy=estimates.share(hits, evaluation, data, number),
            )
            for number, name in enumerate(data.sources)
        },
    }
