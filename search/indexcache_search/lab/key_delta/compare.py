"""Comparison of plans for keys: differences at some thresholds, and other plans that save as much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from indexcache_search.compare import measure
from indexcache_search.compare.held_out import HeldOut
from indexcache_search.compare.measure import Compared, Done
from indexcache_search.compare.run import Candidates, Spec
from indexcache_search.data.sketch import Sketch
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.plan import Plan
from indexcache_search.hf.loading import describe_model
from indexcache_search.lab.key_delta.costs import Costs, main_stage
from indexcache_search.lab.key_delta.engine import KeyEngine
from indexcache_search.lab.key_delta.file import KeyFile
from indexcache_search.lab.key_delta.plan import BLOCK, LONG, METHODS, SINKS, STAGES, KeyMethod, KeyPlan, Stage
from indexcache_search.results.held_out import ComparisonResult
from indexcache_search.results.held_out import HeldOut as HeldOutResult
from indexcache_search.results.variant import BASELINE, NAMED, Variant
from indexcache_search.search.report.drawing import blank, svg
from sglang_indexcache import ModelLayers

BITS = (8, 4)


@dataclass(frozen=True)
class KeyPlanRequest:
    """A threshold for all layers, or those of a file, before the model is known.

    Attributes:
        thresholds: either of the two.
        near: `window`, `max_window` and `recent` of a `KeyPlan`, instead of its own or the file's.
        text: as the user wrote it.
    """

    thresholds: float | KeyFile
    near: Mapping[str, Any]
    text: str

    def plan(self, model: ModelLayers) -> KeyPlan:
        """Make the plan for `model`.

        Raises:
            SearchError: if the file is of another model, or a value is not a threshold.
        """
        if isinstance(self.thresholds, KeyFile):
            return replace(self.thresholds.for_model(model), **self.near)
        return KeyPlan(method="key_delta", values=(self.thresholds,) * model.num_layers, **self.near)


@dataclass(frozen=True, kw_only=True)
class KeyCandidates(Candidates):
    """Plans for keys of a dense model, and patterns beside them.

    Positions behind the first quarter of a text count, and are read at once; replies are decoded.

    Attributes:
        asked: plans of `key_delta`, see `asked_for`.
        rivals: also compare sinks and a window, blocks, and keys of 8 and 4 bits, at equal savings.
    """

    command: ClassVar[str] = "indexcache-lab key-delta eval"
    noun: ClassVar[str] = "plan"
    engine: ClassVar[type[TransformersEngine]] = KeyEngine

    asked: tuple[KeyPlanRequest, ...]
    rivals: bool = True

    @property
    def _files(self) -> dict[str, KeyFile]:
        """Files with thresholds, by their paths."""
        return {item.text: item.thresholds for item in self.asked if isinstance(item.thresholds, KeyFile)}

    def check(self) -> None:
        """Accept any candidates, since there are always thresholds."""

    def reads(self) -> dict[str, Sequence[str]]:
        """See `Candidates.reads`."""
        return {**super().reads(), "--threshold": list(self._files)}

    def describe(self, model: str, specs: Sequence[Spec], seq_len: int | None) -> ModelLayers:
        """See `dense_model`."""
        return dense_model(model, seq_len or LONG)

    def lines(self, specs: Sequence[Spec], model: ModelLayers) -> list[Variant]:
        """See `Candidates.lines`."""
        plans = [item.plan(model) for item in self.asked]
        count = Counter(plan.name for plan in plans)
        lines = [
            Variant(NAMED, plan.name if count[plan.name] == 1 else f"{plan.name} ({item.text})", None, plan)
            for item, plan in zip(self.asked, plans, strict=True)
        ]
        lines += super().lines(specs, model)
        count = Counter(f"{line.name} {line.retention or ''}".strip() for line in lines)
        twice = next((name for name, number in count.items() if number > 1), None)
        if twice is not None:
            raise SearchError(f"two plans are called {twice!r}, expected each --threshold and --pattern once")
        return lines

    def calibrated_on(self, specs: Sequence[Spec]) -> list[Sketch]:
        """See `Candidates.calibrated_on`."""
        return [*(file.calibrated_on() for file in self._files.values()), *super().calibrated_on(specs)]

    def compared(
        self, engine: TransformersEngine, journal: Journal, lines: Sequence[Variant], built: HeldOut, done: Done
    ) -> list[Compared]:
        """See `compare`."""
        assert isinstance(engine, KeyEngine)
        rivalled = [line.pattern for line in lines] if self.rivals else []
        return compare(engine, journal, lines, built, done, rivalled)

    def figures(self, comparison: ComparisonResult) -> Mapping[str, str]:
        """See `figures`."""
        return figures(comparison.held_out)


def asked_for(thresholds: str, near: Mapping[str, Any]) -> tuple[KeyPlanRequest, ...]:
    """Read numbers and files, separated by commas; `near` as of `KeyPlanRequest`.

    Raises:
        SearchError: if a word is neither a number nor a file.
    """
    asked = []
    for word in (item.strip() for item in thresholds.split(",")):
        try:
            asked.append(KeyPlanRequest(float(word), near, word))
        except ValueError:
            if not Path(word).exists():
                raise SearchError(f"--threshold: {word[:60]!r} is neither a number nor a file") from None
            asked.append(KeyPlanRequest(KeyFile.load(Path(word)), near, word))
    return tuple(asked)


def dense_model(model: str, seq_len: int) -> ModelLayers:
    """Describe a dense model by its config.json; positions behind the first quarter of a sequence count.

    Raises:
        SearchError: if the model has indexers.
        ModelConfigError: if the model is of no known family.
    """
    description = describe_model(model)
    if not description.dense:
        raise SearchError(f"{model} has indexers that choose; key-delta is for dense models")
    return replace(description, first_sparse_position=seq_len // 4)


def compare(
    engine: KeyEngine,
    journal: Journal,
    lines: Sequence[Variant],
    built: HeldOut,
    done: Done,
    rivalled: Sequence[Plan | None],
) -> list[Compared]:
    """Evaluate the baseline, `lines`, and plans that leave out as much as the plans for keys among `rivalled`."""
    costs = {stage: Costs(engine, built.data, journal, stage) for stage in STAGES}
    compared = measure.patterns(engine, journal, lines, built, done)
    more = rival_lines(rivalled, costs[main_stage(built.data)])
    if more:
        compared += measure.patterns(engine, journal, more, built, done)[1:]
    return [replace(item, extra=_skipped(item.row.line, costs)) for item in compared]


def _skipped(line: Variant, costs: Mapping[Stage, Costs]) -> dict[str, Estimate]:
    """Return the shares that a plan leaves out in reading and in decoding, by the title of the column."""
    assert line.pattern is not None
    nothing = Estimate(0.0, 0.0)
    return {
        f"skips {stage}": nothing if line.kind == BASELINE else cost.skipped(line.pattern)
        for stage, cost in costs.items()
        if cost.rows
    }


def figures(held_out: HeldOutResult) -> dict[str, Markup]:
    """Draw the divergence over the share of products of queries with keys left out, a curve for each method."""
    rows = [row for row in held_out.rows if row.kind != BASELINE and row.extra and row.kl is not None]
    title = next(iter(rows[0].extra or {}))
    figure, axes = blank(8, 3.6)
    for method in dict.fromkeys((row.pattern or "").partition("|")[0] for row in rows):
        own = [row for row in rows if (row.pattern or "").partition("|")[0] == method]
        points = [(row.extra[title].mean, row.kl) for row in own if row.extra and row.kl]
        points.sort(key=lambda point: point[0])
        axes.errorbar(
            [skipped for skipped, _ in points],
            [kl.mean for _, kl in points],
            yerr=[kl.stderr or 0.0 for _, kl in points],
            marker="o",
            markersize=4,
            linewidth=1.2,
            linestyle="-" if method in ("key_delta", "key_blocks", "sink_window") else "none",
            label=method if method in METHODS else "patterns",
        )
    axes.set_yscale("log")
    axes.set_xlabel(f"share of the products of queries with keys that is left out, {title.removeprefix('skips ')}")
    axes.set_ylabel("KL to the model as it is")
    axes.legend(frameon=False, fontsize=8)
    return {"What is left out, and what it costs": svg(figure)}


def rival_lines(plans: Sequence[Plan | None], costs: Costs) -> list[Variant]:
    """List plans that leave out as much as each plan of differences, and keys in few bits."""
    of_keys, lines = [plan for plan in plans if isinstance(plan, KeyPlan)], []
    for plan in of_keys:
        skipped = costs.skipped(plan).mean
        lines.append(_rival(plan, "sink_window", float(window_of(skipped, costs.counted))))
        lines.append(_rival(plan, "key_blocks", share_of(skipped, costs.counted)))
    lines += [_rival(plan, "key_bits", float(bits)) for plan in of_keys[:1] for bits in BITS]
    return list(dict.fromkeys(lines))


def _rival(plan: KeyPlan, method: KeyMethod, value: float) -> Variant:
    rival = replace(plan, method=method, values=(value,) * len(plan.values))
    return Variant(NAMED, rival.name, None, rival)


def window_of(skipped: float, counted: NDArray[np.bool_]) -> int:
    """Return the window that leaves out about `skipped` of the pairs of queries and keys; `counted` are the queries."""
    visible, times = _visible(counted)

    def left(window: int) -> float:
        seen = np.minimum(visible, window) + np.minimum(SINKS, np.maximum(visible - window, 0))
        return float((seen * times).sum() / (visible * times).sum())

    return min(range(1, int(visible.max()) + 1), key=lambda window: abs(left(window) - (1 - skipped)))


def share_of(skipped: float, counted: NDArray[np.bool_]) -> float:
    """Return the share of the blocks, to three digits, that leaves out about `skipped` of all pairs."""
    visible, times = _visible(counted)
    blocks = -(-visible // BLOCK)

    def left(share: float) -> float:
        wanted = np.minimum(np.maximum(np.ceil(blocks * share - 1e-6), 3), blocks)
        seen = (wanted - 1) * BLOCK + (visible - 1) % BLOCK + 1  # a query's own block is among them
        return float((seen * times).sum() / (visible * times).sum())

    return min((number / 1000 for number in range(1, 1001)), key=lambda share: abs(left(share) - (1 - skipped)))


def _visible(counted: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count visible keys: their numbers, and how many queries see each number."""
    return np.unique(np.nonzero(counted)[1] + 1, return_counts=True)
