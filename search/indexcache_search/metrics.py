"""metrics.json: everything the report shows, for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search import objectives
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Evaluation
from indexcache_search.line import BASELINE, BEST, MEAN, PHASE, Line
from indexcache_search.objectives import Estimate
from indexcache_search.search import Found, Row, Search
from sglang_indexcache import PatternFile

SCHEMA = "indexcache-search/metrics/v3"


def collect(
    search: Search,
    found: Found,
    file: PatternFile,
    rows: Sequence[Row],
    overlap: NDArray[np.float64] | None,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Metrics of a finished search.

    Args:
        search: the search.
        found: its outcome.
        file: the pattern file made of it.
        rows: the held-out comparison.
        overlap: `[layers, layers]`, from `Search.overlap`; `None` if it was not measured.
        seconds: wall time of each phase of this run; resumed runs only count what they did.
    """
    similarity = search.journal.matrix("similarity")
    return {
        "schema": SCHEMA,
        "pattern_file": file.model_dump(by_alias=True, mode="json"),
        "engine": {"name": search.engine.name, **search.engine.settings},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "cost": {
            **asdict(found.cost),
            "seconds": round(found.cost.seconds, 1),
            "algorithm_1_layer_tokens": search.algorithm_1(),
            "share_of_algorithm_1": found.cost.layer_tokens / max(search.algorithm_1(), 1),
        },
        "steps": _steps(search, found),
        "held_out": held_out(rows, search.held_out.data, search.model.index_topk),
        "look_alikes": [str(item) for item in search.look_alikes(found)],
        "overlap": None if overlap is None else overlap.round(4).tolist(),
        "similarity": None if similarity is None else np.asarray(similarity).round(4).tolist(),
    }


def _steps(search: Search, found: Found) -> list[dict[str, Any]]:
    return [
        {
            "layer": step.layer,
            "full_layers": len(step.pattern.full_layers),
            "pattern": step.pattern.roles,
            "loss": step.loss,
            "increase": _estimate(search.increase(step.pattern)),
            "candidates": {str(layer): value for layer, value in step.losses.items()},
        }
        for step in found.steps
    ]


def held_out(rows: Sequence[Row], data: TokenSet, index_topk: int) -> dict[str, Any]:
    """The held-out comparison: every pattern, and uniform's mean and best over phases where there are several."""
    baseline = next(row.evaluation for row in rows if row.line.kind == BASELINE)
    table = [{**described(row.line), **_measure(row.evaluation, baseline, data)} for row in rows]
    summaries = []
    for retention in dict.fromkeys(row.line.retention for row in rows):
        phases = [row for row in rows if row.line.retention == retention and row.line.kind == PHASE]
        if len(phases) > 1:
            summaries += _phase_summaries(phases, baseline, data)
    return {
        "sources": list(data.sources),
        "answer_sources": _answer_sources(data, index_topk),
        "sequences": data.num_sequences,
        "scored_tokens": data.scored_tokens,
        "sha256": data.sha256,
        "rows": table + summaries,
    }


def described(line: Line) -> dict[str, Any]:
    """A line without what was measured."""
    return {
        "kind": line.kind,
        "name": line.name,
        "retention": None if line.retention is None else str(line.retention),
        "phase": line.phase,
        "full_layers": None if line.pattern is None else len(line.pattern.full_layers),
        "pattern": None if line.pattern is None else line.pattern.roles,
    }


def _answer_sources(data: TokenSet, index_topk: int) -> list[str]:
    """Sources of which a loss mask picks the tokens that count: questions with answers, rather than running text."""
    all_counted = np.asarray(data.scored[:, index_topk + 1 :].all(axis=1))
    return [name for number, name in enumerate(data.sources) if not all_counted[data.source_of == number].all()]


def _phase_summaries(phases: Sequence[Row], baseline: Evaluation, data: TokenSet) -> list[dict[str, Any]]:
    """Mean over phases (its standard error is over sequences: the phases are all there are), and the best phase."""
    count, first = len(phases), phases[0]
    losses = tuple(math.fsum(column) / count for column in zip(*(row.evaluation.losses for row in phases), strict=True))
    mean = replace(first.evaluation, losses=losses)
    correct = np.mean([row.evaluation.correct for row in phases], axis=0)
    best = min(phases, key=lambda row: objectives.loss(row.evaluation, data).mean)
    over_all = Line(MEAN, f"uniform, mean of {count} phases", first.line.retention, None)
    full = {"full_layers": described(first.line)["full_layers"]}
    return [
        {**described(over_all), **full, **_measure(mean, baseline, data, correct)},
        {
            **described(replace(best.line, kind=BEST, name="uniform, best phase")),
            **_measure(best.evaluation, baseline, data),
        },
    ]


def _measure(
    evaluation: Evaluation, baseline: Evaluation, data: TokenSet, correct: NDArray[np.float64] | None = None
) -> dict[str, Any]:
    sources = {}
    hits = np.asarray(evaluation.correct, np.float64) if correct is None else correct
    for number, name in enumerate(data.sources):
        sources[name] = {
            "loss": _estimate(objectives.loss(evaluation, data, number)),
            "increase": _estimate(objectives.increase(evaluation, baseline, data, number)),
            "accuracy": _estimate(objectives.share(hits, evaluation, data, number)),
        }
    return {
        "loss": _estimate(objectives.loss(evaluation, data)),
        "increase": _estimate(objectives.increase(evaluation, baseline, data)),
        "by_source": sources,
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"mean": estimate.mean, "stderr": estimate.stderr}
