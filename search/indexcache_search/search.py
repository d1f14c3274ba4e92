"""One search from loaded engine to finished files' contents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sglang_indexcache
from indexcache_search import estimates
from indexcache_search.data.sketch import Sketch
from indexcache_search.data.tokens import TokenSet, growing_shares
from indexcache_search.engines.base import Engine, Evaluation
from indexcache_search.errors import SearchError
from indexcache_search.estimates import Estimate
from indexcache_search.evaluator import Cost, Evaluator
from indexcache_search.journal import Journal
from indexcache_search.judge import CONFIDENCE, Judge
from indexcache_search.line import NAMED, Line, uniform_lines
from indexcache_search.objectives import Objective
from indexcache_search.strategies import DEFAULT_STRATEGY, STRATEGIES
from indexcache_search.strategies.base import Goal, Problem, Step
from indexcache_search.strategies.greedy import count_evaluations
from indexcache_search.strategies.similarity import Similarity, similarity_pattern
from indexcache_search.strategies.swaps import improve
from indexcache_search.strategies.uniform import Uniform
from sglang_indexcache import Pattern, PatternFile, SparseModel
from sglang_indexcache.pattern import full_layer_count
from sglang_indexcache.pattern_file import (
    CalibrationSection,
    ModelSection,
    SearchSection,
    TrajectoryStep,
)

JOURNAL_FORMAT = 4
MATRIX_SEQUENCES = 8  # that overlap and similarity are measured on


@dataclass(frozen=True)
class Settings:
    """What a search is asked to do.

    Attributes:
        retain: retentions wanted; the first is the pattern file's default.
        strategy: a name among `STRATEGIES`.
        blocks: of block-wise greedy; 1 is Algorithm 1.
        candidates: flips that a lazy step evaluates at least and at most.
        race: compare patterns on growing shares of the sequences, where the strategy does that at all.
        swaps: swaps that local search tries a round; 0 for no local search.
        objective: what is minimised.
        seed: of the calibration data's order.
    """

    retain: tuple[Fraction, ...]
    strategy: str = DEFAULT_STRATEGY
    blocks: int = 1
    candidates: tuple[int, int] = (3, 6)
    race: bool = True
    swaps: int = 0
    objective: Objective = "kl"
    seed: int = 0

    def goal(self, model: SparseModel) -> Goal:
        """What a strategy is asked for on `model`."""
        full_layers = {retention: full_layer_count(model.num_layers, retention) for retention in self.retain}
        return Goal(native=model.native, full_layers=full_layers, blocks=self.blocks, candidates=self.candidates)

    def check(self, model: SparseModel) -> None:
        """Check that the model can be searched so, before anything expensive.

        Raises:
            SearchError: if there is no such strategy, a retention can't be reached, or a search would not end.
        """
        strategy = STRATEGIES.get(self.strategy)
        if strategy is None:
            raise SearchError(f"--strategy is {self.strategy}, expected one of {', '.join(STRATEGIES)}")
        if self.blocks > 1 and not strategy.takes_blocks:
            raise SearchError(f"--blocks {self.blocks} needs --strategy greedy, found {self.strategy}")
        if self.candidates[0] > self.candidates[1]:
            raise SearchError(f"--max-candidates is {self.candidates[1]}, expected at least {self.candidates[0]}")
        strategy.check(self.goal(model))


@dataclass(frozen=True)
class Found:
    """The outcome of a strategy.

    Attributes:
        steps: nested flips, where there are such.
        patterns: by retention; all on the way of `steps`, or better than what is.
        rivals: other patterns that ran on all calibration sequences, by retention, the best first.
        cost: of all evaluations on the calibration set.
    """

    steps: tuple[Step, ...]
    patterns: dict[Fraction, Pattern]
    rivals: dict[Fraction, list[Pattern]]
    cost: Cost


@dataclass(frozen=True)
class LookAlike:
    """`other` costs within noise of `best` on the calibration sequences, and keeps fewer than half of its layers."""

    retention: Fraction
    best: Pattern
    other: Pattern
    difference: Estimate

    def __str__(self) -> str:
        error = "" if self.difference.stderr is None else f" ±{self.difference.stderr:.4f}"
        return (
            f"{self.retention}: {self.other} keeps other layers than {self.best} and costs only"
            f" {self.difference.mean:+.4f}{error} more on these sequences; more of them would tell which is better"
        )


@dataclass(frozen=True)
class Row:
    """One line of the held-out comparison, and what was measured."""

    line: Line
    evaluation: Evaluation


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
        self.strategy, self.goal = STRATEGIES[settings.strategy], settings.goal(engine.model)
        self.on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None
        self.on_step: Callable[[Step, tuple[Step, ...]], None] = lambda step, steps: None
        self.on_pattern: Callable[[Fraction, dict[Fraction, Pattern]], None] = lambda retention, patterns: None
        self.notice: Callable[[str], None] = lambda line: None
        self.calibration = Evaluator(
            engine, calibration, settings.objective, journal, "calibration", lambda item: self.on_evaluation(item)
        )
        self.judge = Judge(self.calibration, settings.race and self.strategy.races)
        self.held_out = Evaluator(engine, held_out, "nll", journal, "held-out", lambda item: self.on_evaluation(item))

    @property
    def model(self) -> SparseModel:
        return self.engine.model

    def planned_sequences(self) -> int | None:
        """Sequences that the strategy will run; `None` where that depends on what it finds."""
        planned = None if self.settings.swaps else self.strategy.planned(self.goal)
        return None if planned is None else (2 + planned) * self.calibration.data.num_sequences

    def algorithm_1(self) -> int:
        """Layer-tokens of the paper's Algorithm 1 to the smallest retention: every layer of every evaluation runs."""
        evaluations = count_evaluations(self.model.native, self.goal.fewest)
        return evaluations * self.model.num_layers * self.calibration.data.tokens.size

    def evaluate_baseline(self) -> None:
        """Evaluate the native pattern, and a part of it twice: the difference is the noise floor."""
        self.calibration.evaluations([self.model.native])
        self.calibration.evaluations([self.model.native], self.judge.shares[0], repeat=1)

    def noise_floor(self) -> float:
        """How far two evaluations of the native pattern lie apart, on the first share of the sequences."""
        rows, data = self.judge.shares[0], self.calibration.data
        first, second = (self.calibration.recorded(self.model.native, repeat).on(rows) for repeat in (0, 1))
        return abs(estimates.loss(second, data).mean - estimates.loss(first, data).mean)

    def find(self) -> Found:
        """Run the strategy, then local search if that is wanted.

        `on_step` is told of every committed flip and of all so far, `on_pattern` of a pattern found at once and of all
        so far, `notice` of what else is worth a line.
        """
        outcome = self.strategy.find(
            Problem(
                goal=self.goal,
                judge=self.judge,
                engine=self.engine.name,
                similarity=self.similarity,
                on_step=self.on_step,
                on_pattern=self.on_pattern,
                notice=self.notice,
            )
        )
        patterns = outcome.patterns
        if self.settings.swaps:
            patterns = {retention: self._improved(pattern) for retention, pattern in patterns.items()}
        self.calibration.evaluations(list(patterns.values()))
        return Found(outcome.steps, patterns, outcome.rivals, self.calibration.cost)

    @cached_property
    def sketch(self) -> str:
        """What tells later comparisons that a text was calibrated on."""
        return Sketch.of(self.calibration.data.tokens).encode()

    def _improved(self, pattern: Pattern) -> Pattern:
        """`pattern` after local search."""
        for swap in improve(pattern, self.model.native, self.judge, self.settings.swaps):
            kept, total = len(swap.pattern.full_layers), len(pattern)
            self.notice(
                f"swap: layer {swap.shared:>3} -> S, {swap.full:>3} -> F, {kept} of {total} F, loss {swap.loss:.4f}"
            )
            pattern = swap.pattern
        return pattern

    def look_alikes(self, found: Found) -> list[LookAlike]:
        """Patterns that calibration can't tell from the one found, and that keep other layers: a warning each."""
        alike = []
        for retention, rivals in found.rivals.items():
            best = found.patterns[retention]
            for other in rivals:
                difference = self.judge.difference(other, best)
                common = len(set(best.full_layers) & set(other.full_layers) - {0})
                wanted = len(best.full_layers) - 1
                if difference.mean <= CONFIDENCE * (difference.stderr or 0.0) and 2 * common < wanted:
                    alike.append(LookAlike(retention, best, other, difference))
        return alike

    # -- held-out comparison

    def comparison_lines(self, found: Found) -> list[Line]:
        """What `compare` evaluates: the baseline, what was found, the paper's uniform pattern, similarity.

        Without uniform where a retention is not 1/n or a locked layer would be `F`; without similarity, if the engine
        can't measure it. `indexcache-eval` compares with uniform at every phase.
        """
        matrix = self.similarity()
        lines, others = [Line.baseline(self.model.native)], []
        for retention, pattern in found.patterns.items():
            lines.append(Line(NAMED, self.strategy.name, retention, pattern))
            baselines = {
                Uniform.name: [line for line in uniform_lines(self.model.native, retention) if line.phase == 0]
            }
            if matrix is not None:
                similar = similarity_pattern(matrix, self.goal.full_layers[retention], self.model.locked)
                baselines[Similarity.name] = [Line(NAMED, Similarity.name, retention, similar)]
            others += [line for name, items in baselines.items() if name != self.strategy.name for line in items]
        return [*lines, *others]

    def compare(self, lines: Sequence[Line]) -> Iterator[Row]:
        """Evaluate on the held-out set, one line after the other: the baseline and what was found come first."""
        for line in lines:
            assert line.pattern is not None
            yield Row(line, self.held_out.evaluations([line.pattern])[0])

    def similarity(self) -> NDArray[np.float64] | None:
        """Cross-layer output similarity on a part of the calibration set, journalled."""
        return self._matrix("similarity", lambda: self.engine.output_similarity(self._sample))

    def overlap(self, rows: int) -> NDArray[np.float64] | None:
        """Cross-layer index overlap on a part of the calibration set, journalled."""
        return self._matrix(f"overlap-{rows}", lambda: self.engine.topk_overlap(self._sample, rows))

    @cached_property
    def _sample(self) -> TokenSet:
        """What matrices are measured on: each sequence gives means over hundreds of queries."""
        return self.calibration.data.taken(growing_shares(self.calibration.data, MATRIX_SEQUENCES)[0])

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
        """The pattern file of what was found."""
        return self._file(found, found.patterns[self.settings.retain[0]])

    def partial_file(self, default: Pattern, steps: tuple[Step, ...], patterns: dict[Fraction, Pattern]) -> PatternFile:
        """The pattern file of a search that goes on: its steps or patterns so far."""
        return self._file(Found(steps, patterns, {}, self.calibration.cost), default)

    def _file(self, found: Found, default: Pattern) -> PatternFile:
        data = self.calibration.data
        baseline = self.calibration.recorded(self.model.native)
        walked = {self.model.native, *(step.pattern for step in found.steps)}
        others = {key: pattern for key, pattern in found.patterns.items() if not found.steps or pattern not in walked}
        chosen = self.calibration.recorded(default)
        return PatternFile(
            schema="indexcache/v1",
            model=ModelSection.of(self.model),
            pattern=default.roles,
            retention=default.retention,
            patterns={str(retention): pattern.roles for retention, pattern in others.items()},
            trajectory=tuple(
                TrajectoryStep(layer=step.layer, pattern_loss=step.loss, stderr=self.increase(step.pattern).stderr)
                for step in found.steps
            ),
            search=SearchSection(
                strategy=self.strategy.name,
                objective=self.settings.objective,
                baseline_loss=estimates.loss(baseline, data).mean,
                loss=estimates.loss(chosen, data).mean,
                evaluations=found.cost.evaluations - 2,  # the baseline's own two
                evaluated_sequences=found.cost.sequences,
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
                sketch=self.sketch,
            ),
            versions={
                "sglang_indexcache": sglang_indexcache.__version__,
                "engine": self.engine.name,
                "torch": self.engine.settings["torch"],
            },
            created=self.journal.facts["created"],
        )

    def increase(self, pattern: Pattern) -> Estimate:
        """How much a pattern raises the calibration loss over the native pattern's."""
        evaluation, baseline = self.calibration.evaluations([pattern, self.model.native])
        return estimates.increase(evaluation, baseline, self.calibration.data)


def identity(engine: Engine, calibration: TokenSet, held_out: TokenSet, settings: Settings) -> dict[str, Any]:
    """What evaluations depend on: the journal's identity."""
    return {
        **engine_identity(engine),
        "objective": settings.objective,
        "calibration": calibration.sha256,
        "held-out": held_out.sha256,
    }


def engine_identity(engine: Engine) -> dict[str, Any]:
    """The part of a journal's identity that says what evaluates."""
    return {
        "format": JOURNAL_FORMAT,
        "model": engine.model.name,
        "config_sha256": engine.model.config_sha256,
        "weights_sha256": engine.weights_sha256,
        "engine": engine.name,
        **engine.settings,
    }


def today() -> dict[str, str]:
    """Facts a journal remembers from the first run."""
    return {"created": time.strftime("%Y-%m-%d")}
