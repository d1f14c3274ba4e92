"""A comparison on held-out data as rows: every line, and uniform's mean and best over its phases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.losses import Losses
from indexcache_search.results.names import suffix
from indexcache_search.results.schema import HeldOut, PricesResult, Row, SourceResult
from indexcache_search.results.variant import BASELINE, BEST, MEAN, PHASE, Variant, VariantLosses
from indexcache_search.strategies.budget.layers import Prices
from sglang_indexcache.pattern.selection import PatternSelection


def tabulated(
    rows: Sequence[VariantLosses], data: TokenSet, first_sparse_position: int, prices: Prices | None
) -> HeldOut:
    """Tabulate the held-out comparison: every pattern, and uniform's mean and best over its phases."""
    baseline = next(row.evaluation for row in rows if row.line.kind == BASELINE)
    table = [
        Row(
            **_described(row.line), **_speed(row.line, rows[0].line, prices), **_measure(row.evaluation, baseline, data)
        )
        for row in rows
    ]
    uniform = [row for row in rows if row.line.kind == PHASE]
    selections = [_group(row)[1] for row in uniform]
    for group in dict.fromkeys(map(_group, uniform)):
        phases = [row for row in uniform if _group(row) == group]
        if len(phases) > 1:
            more = suffix(group[1], selections)
            table += _phase_summaries(phases, baseline, data, more=more, native=rows[0].line, prices=prices)
    return HeldOut(
        sources=list(data.sources),
        answer_sources=_answer_sources(data, first_sparse_position),
        sequences=data.num_sequences,
        scored_tokens=data.scored_tokens,
        sha256=data.sha256,
        rows=table,
        prices=_priced(rows[0].line, prices),
    )


def _priced(baseline: Variant, prices: Prices | None) -> PricesResult | None:
    if prices is None:
        return None
    native = baseline.letters if prices.whole else None
    took = None if native is None else round(prices.prompt_ms(native), 1)
    return PricesResult(table=prices.table, context=prices.context, words=prices.words, baseline_ms=took)


def _described(line: Variant) -> dict[str, Any]:
    """Return the columns of a `schema.Row` that identify it."""
    plan = line.pattern
    return {
        "kind": line.kind,
        "name": line.name,
        "retention": None if line.retention is None else str(line.retention),
        "phase": line.phase,
        "full_layers": None if line.letters is None else len(line.letters.full_layers),
        "pattern": None if plan is None else str(plan),
        **({} if line.served is None else {"served": line.served}),
    }


def _speed(line: Variant, baseline: Variant, prices: Prices | None) -> dict[str, Any]:
    """Return the column of a `schema.Row` that is reckoned, where the latency table has the pattern's blocks."""
    pattern, native = line.letters, baseline.letters
    if prices is None or pattern is None or native is None:
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
    return row.line.retention, None if row.line.letters is None else row.line.letters.selection


def _phase_summaries(
    phases: Sequence[VariantLosses],
    baseline: Losses,
    data: TokenSet,
    *,
    more: str,
    native: Variant,
    prices: Prices | None,
) -> list[Row]:
    """Mean over phases (its standard error is over sequences: the phases are all there are), and the best phase."""
    count, first = len(phases), phases[0]
    losses = tuple(math.fsum(column) / count for column in zip(*(row.evaluation.losses for row in phases), strict=True))
    mean = replace(first.evaluation, losses=losses)
    correct = np.mean([row.evaluation.correct for row in phases], axis=0)
    best = min(phases, key=lambda row: estimates.loss(row.evaluation, data).mean)
    over_all = _described(Variant(MEAN, f"uniform, mean of {count} phases{more}", first.line.retention, None))
    over_all["full_layers"] = _described(first.line)["full_layers"]
    over_all |= _speed(first.line, native, prices)  # the same at all phases, unless layers are locked
    best_line = replace(best.line, kind=BEST, name=f"uniform, best phase{more}")
    return [
        Row(**over_all, **_measure(mean, baseline, data, correct)),
        Row(**_described(best_line), **_speed(best.line, native, prices), **_measure(best.evaluation, baseline, data)),
    ]


def _measure(
    evaluation: Losses, baseline: Losses, data: TokenSet, correct: NDArray[np.float64] | None = None
) -> dict[str, Any]:
    """Return the columns of a `schema.Row` that were measured."""
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
