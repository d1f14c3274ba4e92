"""Run a whole search: begin, choose, compare, write."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from typing import Any

from indexcache_search.console import warn
from indexcache_search.engines.base import OVERLAP, Engine, TimesPrompts
from indexcache_search.eval.speeds import speeds
from indexcache_search.eval.table import tabulated
from indexcache_search.results.pages import UNWRITTEN, pages
from indexcache_search.results.schema import CostResult, SearchResult, SpeedRow, StepResult
from indexcache_search.results.variant import BASELINE, VariantLosses
from indexcache_search.searching.begin import Begun, begun
from indexcache_search.searching.comparison import comparison_lines, evaluated
from indexcache_search.searching.job import SearchJob
from indexcache_search.searching.pattern_writer import FileWriter
from indexcache_search.searching.progress import SearchProgress
from indexcache_search.searching.search import Found, Search
from indexcache_search.strategies import measured_strategies
from indexcache_search.strategies.base import Goal, Outcome, Step, TimeGoal
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.strategies.budget.pricing import ANYWHERE, column
from indexcache_search.workdir.outputs import PARTIAL, Outputs
from sglang_indexcache import Pattern
from sglang_indexcache.command_line import error_context
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.pattern_file.result_folder import CARD, METRICS, PATTERN, REPORT

SCHEMA = "indexcache-search/metrics/v3"


def run(job: SearchJob) -> SearchResult:
    """Search a model, write pattern.yaml, metrics.json, report.html and README.md, and return what they show.

    Raises:
        IndexCacheError: if a request can't be met.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    if pages() is None:
        warn(job.console, f"{REPORT} and {CARD} are {UNWRITTEN}")
    with begun(job) as (search, out):
        budget = search.goal.budget
        if isinstance(budget, TimeGoal) and (unlike := budget.prices.unlike):
            warn(job.console, f"--prefill: reckoned as {budget.prices.table}, which this model is not: {unlike}")
        with SearchProgress(job.console, search) as progress:
            result = _Run(search, out, progress, job.data.seed).result()
        result = result.model_copy(update={"command": job.command})
        out.replace(texts(result, job.model), job.console)
    return result


def texts(result: SearchResult, model: str) -> dict[str, str]:
    """Return the contents of pattern.yaml, metrics.json, report.html and README.md, by name; see `Pages`."""
    named, made = ModelName.parse(model), pages()
    return {
        PATTERN: result.pattern_file.dumps(),
        METRICS: json.dumps(result.as_json(), indent=1) + "\n",
        **({} if made is None else made.search(result, named.repository if named.folder is None else None)),
    }


class _Run:
    """The phases of a search; patterns that are found on the way are written down at once."""

    def __init__(self, begun: Begun, out: Outputs, progress: SearchProgress, seed: int) -> None:
        self._begun, self._out, self._progress = begun, out, progress
        chooses = begun.chooses(progress.evaluated)
        self._writer = FileWriter(begun.engine, chooses, seed, begun.journal.facts["created"])
        self._search, self._judges = begun.search(chooses), begun.judges(progress.evaluated)
        self._seconds: dict[str, float] = {}

    def result(self) -> SearchResult:
        """Run all phases."""
        begun, engine, goal = self._begun, self._begun.engine, self._begun.goal
        with self._timed("search", "baseline"):
            found = self._choose(self._search)
        with self._timed("overlap and similarity"):
            names = (OVERLAP, *(rule.name for rule in measured_strategies(engine.model.dense)))
            measured = {name: begun.matrices.measured(name) for name in names}
            lines = comparison_lines(found, goal.native, measured)
        for look_alike in found.look_alikes:
            warn(self._progress.console, str(look_alike))
        rows: list[VariantLosses] = []
        with self._timed("held-out comparison"):
            for row in evaluated(lines, self._judges):
                rows.append(row)
                self._progress.compared(row, rows[0])
        speed: list[SpeedRow] = []
        if isinstance(engine, TimesPrompts) and (timer := speeds()) is not None:
            timed = [line for line in lines if line.kind == BASELINE or line.name == found.strategy.name]
            with self._timed("times of prompts"):
                speed = timer.searched(engine, timed, begun.held_out, begun.journal)
        elif isinstance(engine, TimesPrompts):
            warn(self._progress.console, "prompts are not timed: that needs an extension which is not installed")
        with error_context("looking whether the model is still the same"):
            engine.check_unchanged()
        prices = prices_of(engine, goal, partial(warn, self._progress.console))
        default = found.within_budget or found.patterns[next(iter(goal.full_layers))]
        more: dict[str, Any] = {
            name: None if item is None else item.round(4).tolist() for name, item in measured.items()
        }
        if speed:
            more["speed"] = speed
        return SearchResult(
            schema=SCHEMA,
            pattern_file=self._writer.file(found, default, goal.budget),
            engine={"name": engine.name, **engine.settings},
            weights_sha256=engine.weights_sha256,
            seconds={name: round(value, 1) for name, value in self._seconds.items()},
            cost=CostResult(
                **{**asdict(found.cost), "seconds": round(found.cost.seconds, 1)},
                algorithm_1_layer_tokens=found.algorithm_1,
                share_of_algorithm_1=found.cost.layer_tokens / max(found.algorithm_1, 1),
            ),
            steps=_steps(found),
            held_out=tabulated(rows, begun.held_out, engine.model.first_sparse_position, prices),
            look_alikes=[str(item) for item in found.look_alikes],
            **more,
        )

    @contextmanager
    def _timed(self, name: str, first: str | None = None) -> Iterator[None]:
        began = time.monotonic()
        self._progress.begin(first or name)
        with error_context(name):
            yield
        self._seconds[name] = time.monotonic() - began

    def _choose(self, search: Search) -> Found:
        def on_step(step: Step, steps: tuple[Step, ...]) -> None:
            found = search.found(Outcome({}, steps))
            self._out.work.write(PARTIAL, self._writer.file(found, step.pattern).dumps())
            self._progress.committed(step)

        def on_pattern(retention: Fraction, patterns: dict[Fraction, Pattern]) -> None:
            found = search.found(Outcome(patterns))
            self._out.work.write(PARTIAL, self._writer.file(found, next(iter(found.patterns.values()))).dumps())
            self._progress.notice(f"{retention!s:>4}: {found.patterns[retention]}")

        return search.find(on_step, on_pattern, self._progress.notice)


def prices_of(engine: Engine, goal: Goal, notice: Callable[[str], None]) -> Prices | None:
    """Return the latencies by which the speeds of a search are shown, `None` where there are none.

    Their words say if they are of another device or SGLang than the servers have. `notice` hears why there are none,
    where the architecture has a table.
    """
    if isinstance(goal.budget, TimeGoal):
        return goal.budget.prices
    return column(engine.model, notice, place=getattr(engine, "place", ANYWHERE))


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
