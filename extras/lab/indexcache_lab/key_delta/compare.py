"""Comparison of plans for keys: differences at some thresholds, and other plans that save as much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from indexcache_lab.dense import describe_dense
from indexcache_lab.key_delta.engine import Costs, KeyEngine, main_stage
from indexcache_lab.key_delta.file import KeyFile
from indexcache_lab.key_delta.plan import BLOCK, LONG, METHODS, SINKS, STAGES, KeyMethod, KeyPlan
from indexcache_report.drawing import blank, svg
from indexcache_search.data.sketch import Sketch
from indexcache_search.engines.base import Engine
from indexcache_search.engines.registry import Surroundings
from indexcache_search.engines.settings import RunSettings
from indexcache_search.errors import SearchError
from indexcache_search.eval import measure
from indexcache_search.eval.candidates import Candidates, Spec
from indexcache_search.eval.held_out import ComparisonSet
from indexcache_search.eval.measure import Compared, Done
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.plan import Plan
from indexcache_search.results.schema import ComparisonResult, HeldOut
from indexcache_search.results.variant import BASELINE, NAMED, Variant
from sglang_indexcache import ModelLayers

BITS = (8, 4)


@dataclass(frozen=True, kw_only=True)
class KeyCandidates(Candidates):
    """Plans for keys of a dense model, and patterns beside them.

    Positions behind the first quarter of a text count, and are read at once; replies are decoded.

    Attributes:
        thresholds: a threshold for all layers, or those of a file, each with its text on the command line.
        near: `window`, `max_window` and `recent` of a `KeyPlan`, instead of its own or a file's.
        rivals: also compare sinks and a window, blocks, and keys of 8 and 4 bits, at equal savings.
    """

    command: ClassVar[str] = "indexcache-lab key-delta eval"
    noun: ClassVar[str] = "plan"

    thresholds: tuple[tuple[str, float | KeyFile], ...]
    near: Mapping[str, Any]
    rivals: bool

    @property
    def _files(self) -> dict[str, KeyFile]:
        """Files with thresholds, by their paths."""
        return {text: item for text, item in self.thresholds if isinstance(item, KeyFile)}

    def check(self) -> None:
        """Accept any candidates, since there are always thresholds."""

    def reads(self) -> dict[str, Sequence[str]]:
        """See `Candidates.reads`."""
        return {**super().reads(), "--threshold": list(self._files)}

    def describe(self, model: str, specs: Sequence[Spec], seq_len: int | None) -> ModelLayers:
        """See `describe_dense`."""
        return replace(describe_dense(model), first_sparse_position=(seq_len or LONG) // 4)

    def lines(self, specs: Sequence[Spec], model: ModelLayers) -> list[Variant]:
        """See `Candidates.lines`."""
        plans = [(text, self._plan(item, model)) for text, item in self.thresholds]
        count = Counter(plan.name for _, plan in plans)
        lines = [
            Variant(NAMED, plan.name if count[plan.name] == 1 else f"{plan.name} ({text})", None, plan)
            for text, plan in plans
        ]
        lines += super().lines(specs, model)
        count = Counter(f"{line.name} {line.retention or ''}".strip() for line in lines)
        twice = next((name for name, number in count.items() if number > 1), None)
        if twice is not None:
            raise SearchError(f"two plans are called {twice!r}, expected each --threshold and --pattern once")
        return lines

    def _plan(self, thresholds: float | KeyFile, model: ModelLayers) -> KeyPlan:
        if isinstance(thresholds, KeyFile):
            return replace(thresholds.for_model(model), **self.near)
        return KeyPlan(method="key_delta", values=(thresholds,) * model.num_layers, **self.near)

    def calibrated_on(self, specs: Sequence[Spec]) -> list[Sketch]:
        """See `Candidates.calibrated_on`."""
        return [*(file.calibrated_on() for file in self._files.values()), *super().calibrated_on(specs)]

    def parse(self, key: str) -> Plan:
        """See `KeyEngine.parse`."""
        return KeyEngine.parse(key)

    def engine(
        self, model: str, run: RunSettings, description: ModelLayers, around: Surroundings
    ) -> AbstractContextManager[Engine]:
        """See `Candidates.engine`."""
        return nullcontext(KeyEngine.load(model, **run.here, notice=around.announce))

    def compared(
        self, engine: Engine, journal: Journal, lines: Sequence[Variant], built: ComparisonSet, done: Done
    ) -> list[Compared]:
        """See `compare`."""
        assert isinstance(engine, KeyEngine)
        rivalled = [line.pattern for line in lines if isinstance(line.pattern, KeyPlan) and self.rivals]
        return compare(engine, journal, lines, built, done, rivalled=rivalled)

    def figures(self, comparison: ComparisonResult) -> Mapping[str, str]:
        """See `figures`."""
        return figures(comparison.held_out)


def read_thresholds(text: str) -> tuple[tuple[str, float | KeyFile], ...]:
    """Read numbers and files, separated by commas; see `KeyCandidates.thresholds`.

    Raises:
        SearchError: if a word is neither a number nor a file.
    """
    found: list[tuple[str, float | KeyFile]] = []
    for word in (item.strip() for item in text.split(",")):
        try:
            found.append((word, float(word)))
        except ValueError:
            if not Path(word).exists():
                raise SearchError(f"--threshold: {word[:60]!r} is neither a number nor a file") from None
            found.append((word, KeyFile.load(Path(word))))
    return tuple(found)


def compare(
    engine: KeyEngine,
    journal: Journal,
    lines: Sequence[Variant],
    built: ComparisonSet,
    done: Done,
    *,
    rivalled: Sequence[KeyPlan],
) -> list[Compared]:
    """Evaluate the baseline, `lines`, and plans that leave out as much as those of `rivalled`."""
    costs = {stage: Costs(engine, built.data, journal, stage, "held-out") for stage in STAGES}
    compared = measure.patterns(engine, journal, lines, built, done)
    more = rival_lines(rivalled, costs[main_stage(built.data)])
    if more:
        compared += measure.patterns(engine, journal, more, built, done)[1:]

    def with_costs(item: Compared) -> Compared:
        plan = item.line.pattern
        assert plan is not None
        return replace(item, extra={f"skips {stage}": cost.skipped(plan) for stage, cost in costs.items() if cost.rows})

    return [with_costs(item) for item in compared]


def figures(held_out: HeldOut) -> dict[str, Markup]:
    """Draw the divergence over the share of products of queries with keys left out, a curve for each method."""
    rows = [row for row in held_out.rows if row.kind != BASELINE and row.extra]
    skips = next(iter(rows[0].extra or {}))
    curves: dict[str, list[tuple[float, Estimate]]] = {}
    for row in rows:
        if row.extra and row.kl:
            curves.setdefault((row.pattern or "").partition("|")[0], []).append((row.extra[skips].mean, row.kl))
    figure, axes = blank(8, 3.6)
    for method, points in curves.items():
        skipped, divergences = zip(*sorted(points, key=itemgetter(0)), strict=True)
        axes.errorbar(
            skipped,
            [kl.mean for kl in divergences],
            yerr=[kl.stderr or 0.0 for kl in divergences],
            marker="o",
            markersize=4,
            linewidth=1.2,
            linestyle="-" if method in ("key_delta", "key_blocks", "sink_window") else "none",
            label=method if method in METHODS else "patterns",
        )
    axes.set_yscale("log")
    axes.set_xlabel(f"share of the products of queries with keys that is left out, {skips.removeprefix('skips ')}")
    axes.set_ylabel("KL to the model as it is")
    axes.legend(frameon=False, fontsize=8)
    title = "What is left out, and what it costs"
    return {title: svg(figure, title)}


def rival_lines(plans: Sequence[KeyPlan], costs: Costs) -> list[Variant]:
    """List plans that leave out as much as each plan of differences, and keys in few bits."""
    lines = []
    for plan in plans:
        skipped = costs.skipped(plan).mean
        lines.append(_rival(plan, "sink_window", float(window_of(skipped, costs.counted))))
        lines.append(_rival(plan, "key_blocks", share_of(skipped, costs.counted)))
    lines += [_rival(plan, "key_bits", float(bits)) for plan in plans[:1] for bits in BITS]
    return list(dict.fromkeys(lines))


def _rival(plan: KeyPlan, method: KeyMethod, value: float) -> Variant:
    rival = replace(plan, method=method, values=(value,) * len(plan.values))
    return Variant(NAMED, rival.name, None, rival)


def window_of(skipped: float, counted: NDArray[np.bool_]) -> int:
    """Return the window that leaves out about `skipped` of the pairs of queries and keys; `counted` are the queries."""

    def seen(visible: NDArray[np.int64], window: float) -> Any:
        return np.minimum(visible, window) + np.minimum(SINKS, np.maximum(visible - window, 0))

    return int(_closest(range(1, counted.shape[1] + 1), seen, skipped, counted))


def share_of(skipped: float, counted: NDArray[np.bool_]) -> float:
    """Return the share of the blocks, to three digits, that leaves out about `skipped` of all pairs."""

    def seen(visible: NDArray[np.int64], share: float) -> Any:
        blocks = -(-visible // BLOCK)
        chosen = np.minimum(np.maximum(np.ceil(blocks * share - 1e-6), 3), blocks)
        return (chosen - 1) * BLOCK + (visible - 1) % BLOCK + 1  # a query's own block is among them

    return _closest([number / 1000 for number in range(1, 1001)], seen, skipped, counted)


def _closest(
    values: Sequence[float],
    seen: Callable[[NDArray[np.int64], float], Any],
    skipped: float,
    counted: NDArray[np.bool_],
) -> float:
    """Return the first of `values` with which queries see closest to `1 - skipped` of their visible keys."""
    visible, queries = np.unique(np.nonzero(counted)[1] + 1, return_counts=True)
    everything = visible @ queries
    return min(values, key=lambda value: abs(seen(visible, value) @ queries / everything - (1 - skipped)))
