"""One search from loaded engine to finished files' contents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import sglang_indexcache
from indexcache_search import objectives
from indexcache_search.engines.base import Engine, Evaluation, Objective
from indexcache_search.errors import SearchError
from indexcache_search.evaluator import Evaluator
from indexcache_search.journal import Journal
from indexcache_search.objectives import Estimate
from indexcache_search.strategies.greedy import Step, check_reachable, count_evaluations, greedy
from indexcache_search.strategies.similarity import similarity_pattern
from indexcache_search.tokens import TokenSet
from sglang_indexcache import DsaModel, Pattern, PatternFile
from sglang_indexcache.errors import PatternError
from sglang_indexcache.pattern import full_layer_count
from sglang_indexcache.pattern_file import (
    CalibrationSection,
    ModelSection,
    SearchSection,
    TrajectoryStep,
)

Strategy = Literal["greedy", "uniform", "similarity"]
BASELINE = "baseline"


@dataclass(frozen=True)
class Settings:
    """What a search is asked to do.

    Attributes:
        retain: retentions wanted; the first is the pattern file's default.
        strategy: `greedy` is the paper's search, the others its baselines.
        blocks: of block-wise greedy; 1 is Algorithm 1.
        objective: what is minimised.
        seed: of the calibration data's order.
    """

    retain: tuple[Fraction, ...]
    strategy: Strategy = "greedy"
    blocks: int = 1
    objective: Objective = "nll"
    seed: int = 0

    def full_layers(self, model: DsaModel) -> dict[Fraction, int]:
        """`F` layers at each retention."""
        return {retention: full_layer_count(model.num_layers, retention) for retention in self.retain}

    def check(self, model: DsaModel) -> None:
        """Check that the model can be searched so, before anything expensive.

        Raises:
            SearchError: if a retention can't be reached.
        """
        for retention, stop in self.full_layers(model).items():
            if self.strategy == "uniform":
                uniform_pattern(model, retention)
            check_reachable(model.native, stop, self.blocks if self.strategy == "greedy" else 1)


@dataclass(frozen=True)
class Found:
    """The outcome of a strategy: nested `steps` (greedy) or single `patterns`, and what it cost."""

    steps: tuple[Step, ...]
    patterns: dict[Fraction, Pattern]
    evaluations: int


@dataclass(frozen=True)
class Row:
    """One line of the held-out comparison."""

    name: str
    retention: Fraction
    pattern: Pattern
    evaluation: Evaluation


def uniform_pattern(model: DsaModel, retention: Fraction, phase: int = 0) -> Pattern:
    """The paper's uniform pattern at `retention`.

    Raises:
        SearchError: if the retention is not 1/n, or a locked layer would have to be `F`.
    """
    if retention.numerator != 1:
        raise SearchError(f"--strategy uniform needs retentions of the form 1/n, found {retention}")
    pattern = Pattern.uniform(model.num_layers, retention.denominator, phase)
    try:
        pattern.check_fits(model.num_layers, model.locked)
    except PatternError as error:
        raise SearchError(f"uniform {retention}: {error}") from None
    return pattern


class Search:
    """Runs one strategy and compares what it found with the baselines on held-out data.

    Args:
        engine: evaluates patterns.
        calibration: tokens that choose.
        held_out: tokens that judge.
        settings: see `Settings`.
        journal: remembers evaluations.
    """

    def __init__(
        self, engine: Engine, calibration: TokenSet, held_out: TokenSet, settings: Settings, journal: Journal
    ) -> None:
        settings.check(engine.model)
        self.engine, self.settings, self.journal = engine, settings, journal
        self.on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None
        self.calibration = Evaluator(
            engine, calibration, settings.objective, journal, "calibration", lambda item: self.on_evaluation(item)
        )
        self.held_out = Evaluator(engine, held_out, "nll", journal, "held-out", lambda item: self.on_evaluation(item))

    @property
    def model(self) -> DsaModel:
        return self.engine.model

    def planned_evaluations(self) -> int:
        """Evaluations the strategy will ask for, the two of the baseline included."""
        if self.settings.strategy != "greedy":
            return 2 + len(self.settings.retain)
        stop = min(self.settings.full_layers(self.model).values())
        return 2 + count_evaluations(self.model.native, stop, self.settings.blocks)

    def evaluate_baseline(self) -> None:
        """Evaluate the native pattern, twice: their difference is the noise floor."""
        for repeat in (0, 1):
            self.calibration.evaluations([self.model.native], repeat)

    def noise_floor(self) -> float:
        """How far two evaluations of the native pattern lie apart."""
        first, second = (self.calibration.recorded(self.model.native, repeat) for repeat in (0, 1))
        data = self.calibration.data
        return abs(objectives.loss(second, data).mean - objectives.loss(first, data).mean)

    def find(self, on_step: Callable[[Step, tuple[Step, ...]], None]) -> Found:
        """Run the strategy; `on_step` is told of every committed flip and of all so far."""
        counts = self.settings.full_layers(self.model)
        if self.settings.strategy == "greedy":
            return self._find_greedy(counts, on_step)
        if self.settings.strategy == "uniform":
            patterns = {retention: uniform_pattern(self.model, retention) for retention in counts}
        else:
            matrix = self.similarity()
            if matrix is None:
                raise SearchError(
                    f"--strategy similarity can't be had with {self.engine.name}, expected greedy or uniform"
                )
            patterns = {
                retention: similarity_pattern(matrix, count, self.model.locked) for retention, count in counts.items()
            }
        self.calibration.evaluations(list(patterns.values()))
        return Found((), patterns, len(set(map(str, patterns.values()))))

    def _find_greedy(self, counts: dict[Fraction, int], on_step: Callable[[Step, tuple[Step, ...]], None]) -> Found:
        steps: list[Step] = []
        start, stop = self.model.native, min(counts.values())
        for step in greedy(start, stop, self.calibration.losses, self.settings.blocks):
            steps.append(step)
            on_step(step, tuple(steps))
        nested = [self.model.native, *(step.pattern for step in steps)]
        by_count = {len(pattern.full_layers): pattern for pattern in nested}
        return Found(tuple(steps), {retention: by_count[count] for retention, count in counts.items()}, _asked(steps))

    # -- held-out comparison

    def comparison_patterns(self, found: Found) -> list[tuple[str, Fraction, Pattern]]:
        """Names, retentions and patterns that `compare` evaluates: found, uniform at every phase, similarity.

        Without similarity, if the engine can't measure it.
        """
        matrix = self.similarity()
        rows: list[tuple[str, Fraction, Pattern]] = [(BASELINE, Fraction(1), self.model.native)]
        for retention, pattern in found.patterns.items():
            rows.append((self.settings.strategy, retention, pattern))
            if self.settings.strategy != "uniform" and retention.numerator == 1:
                rows += self._uniform_rows(retention)
            if self.settings.strategy != "similarity" and matrix is not None:
                count = self.settings.full_layers(self.model)[retention]
                rows.append(("similarity", retention, similarity_pattern(matrix, count, self.model.locked)))
        return rows

    def _uniform_rows(self, retention: Fraction) -> list[tuple[str, Fraction, Pattern]]:
        rows = []
        for phase in range(retention.denominator):
            try:
                pattern = uniform_pattern(self.model, retention, phase)
            except SearchError:
                continue  # a locked layer would have to run an indexer it does not have
            rows.append((f"uniform phase {phase}", retention, pattern))
        return rows

    def compare(self, patterns: Sequence[tuple[str, Fraction, Pattern]]) -> list[Row]:
        """Evaluate on the held-out set."""
        evaluations = self.held_out.evaluations([pattern for _, _, pattern in patterns])
        return [
            Row(name, retention, pattern, evaluation)
            for (name, retention, pattern), evaluation in zip(patterns, evaluations, strict=True)
        ]

    def similarity(self) -> NDArray[np.float64] | None:
        """Cross-layer output similarity on the calibration set, journalled."""
        return self._matrix("similarity", lambda: self.engine.output_similarity(self.calibration.data))

    def overlap(self, rows: int) -> NDArray[np.float64] | None:
        """Cross-layer index overlap on the calibration set, journalled."""
        return self._matrix(f"overlap-{rows}", lambda: self.engine.topk_overlap(self.calibration.data, rows))

    def _matrix(self, name: str, measure: Callable[[], NDArray[np.float64] | None]) -> NDArray[np.float64] | None:
        recorded = self.journal.matrix(name)
        if recorded is None:
            measured = measure()
            if measured is None:
                return None
            recorded = measured.tolist()
            self.journal.add_matrix(name, recorded)
        return np.asarray(recorded)

    # -- the file

    def pattern_file(self, found: Found) -> PatternFile:
        """The pattern file of what was found; also of a search that is not finished."""
        data = self.calibration.data
        baseline = self.calibration.recorded(self.model.native)
        default = found.patterns[self.settings.retain[0]]
        others = {} if found.steps or self.settings.strategy == "greedy" else found.patterns
        chosen = self.calibration.recorded(default)
        return PatternFile(
            schema="indexcache/v1",
            model=ModelSection(
                architecture=self.model.architecture,
                num_layers=self.model.num_layers,
                config_sha256=self.model.config_sha256,
                name=self.model.name,
                locked_layers=self.model.locked,
            ),
            pattern=default.roles,
            retention=default.retention,
            patterns={str(retention): pattern.roles for retention, pattern in others.items()},
            trajectory=tuple(
                TrajectoryStep(layer=step.layer, pattern_loss=step.loss, stderr=self.increase(step.pattern).stderr)
                for step in found.steps
            ),
            search=SearchSection(
                strategy=self.settings.strategy,
                objective=self.settings.objective,
                baseline_loss=objectives.loss(baseline, data).mean,
                loss=objectives.loss(chosen, data).mean,
                evaluations=found.evaluations,
                seed=self.settings.seed,
                blocks=self.settings.blocks,
                noise_floor=self.noise_floor(),
            ),
            calibration=CalibrationSection(
                sources=data.sources,
                sha256=data.sha256,
                sequences=data.num_sequences,
                seq_len=data.seq_len,
                scored_tokens=data.scored_tokens,
            ),
            versions={
                "sglang_indexcache": sglang_indexcache.__version__,
                "engine": self.engine.name,
                "torch": self.engine.settings["torch"],
            },
            created=self.journal.facts["created"],
        )

    def partial_file(self, steps: tuple[Step, ...]) -> PatternFile:
        """The pattern file of an unfinished greedy search; its default is the last step's pattern."""
        return self.pattern_file(Found(steps, {self.settings.retain[0]: steps[-1].pattern}, _asked(steps)))

    def increase(self, pattern: Pattern) -> Estimate:
        """How much an evaluated pattern raises the calibration loss over the native pattern's."""
        baseline, evaluation = (self.calibration.recorded(item) for item in (self.model.native, pattern))
        return objectives.increase(evaluation, baseline, self.calibration.data)


def _asked(steps: Sequence[Step]) -> int:
    """Evaluations that greedy's `steps` asked for."""
    return sum(len(step.losses) for step in steps)


def identity(engine: Engine, calibration: TokenSet, held_out: TokenSet, settings: Settings) -> dict[str, Any]:
    """What evaluations depend on: the journal's identity."""
    return {
        "model": engine.model.name,
        "config_sha256": engine.model.config_sha256,
        "engine": engine.name,
        **engine.settings,
        "objective": settings.objective,
        "calibration": calibration.sha256,
        "held-out": held_out.sha256,
    }


def today() -> dict[str, str]:
    """Facts a journal remembers from the first run."""
    return {"created": time.strftime("%Y-%m-%d")}
