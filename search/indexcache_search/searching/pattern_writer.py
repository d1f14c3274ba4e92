"""The pattern file of what a search has found."""

from __future__ import annotations

from functools import cached_property

import sglang_indexcache
from indexcache_search.data.sketch import Sketch
from indexcache_search.engines.base import Engine
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.searching.search import Found
from indexcache_search.strategies.base import BudgetGoal
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.pattern_file.file import (
    CalibrationSection,
    ModelSection,
    SearchSection,
    TrajectoryStep,
)


class FileWriter:
    """Makes the files of one search, also while it goes on; `created` is the date of its first run."""

    def __init__(self, engine: Engine, calibration: Evaluator, seed: int, created: str) -> None:
        self._engine, self._calibration, self._objective = engine, calibration.data, calibration.objective
        self._seed, self._created = seed, created

    @cached_property
    def _sketch(self) -> str:
        """Fingerprints by which later comparisons recognise calibration text."""
        return Sketch.of(self._calibration.tokens).encode()

    def file(self, found: Found, default: Pattern, budget: BudgetGoal | None = None) -> PatternFile:
        """Return the file of `found`, which serves `default`, found for `budget`, unless a retention is requested."""
        data = self._calibration
        walked = {self._engine.model.native, *(step.pattern for step in found.steps)}
        others = {key: pattern for key, pattern in found.patterns.items() if not found.steps or pattern not in walked}
        return PatternFile(
            schema="indexcache/v1",
            model=ModelSection.of(self._engine.model),
            selection=default.selection,
            pattern=default.letters,
            retention=default.retention,
            patterns={str(retention): pattern.letters for retention, pattern in others.items()},
            trajectory=tuple(
                TrajectoryStep(layer=step.layer, pattern_loss=step.loss, stderr=found.increases[step.pattern].stderr)
                for step in found.steps
            ),
            search=SearchSection(
                strategy=found.strategy.name,
                objective=self._objective,
                baseline_loss=found.baseline_loss,
                loss=found.losses[default],
                evaluations=found.cost.evaluations - 2,  # the baseline's own two
                evaluated_sequences=found.cost.sequences,
                seed=self._seed,
                blocks=found.strategy.blocks,
                noise_floor=found.noise_floor,
                **({} if budget is None else budget.section()),
            ),
            calibration=CalibrationSection(
                sources=data.sources,
                sha256=data.sha256,
                sequences=data.num_sequences,
                seq_len=data.seq_len,
                scored_tokens=data.scored_tokens,
                sketch=self._sketch,
            ),
            versions={
                "sglang_indexcache": sglang_indexcache.__version__,
                "engine": self._engine.name,
                "torch": self._engine.settings["torch"],
            },
            created=self._created,
        )
