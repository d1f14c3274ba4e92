"""One search: a strategy on calibration data, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from indexcache_search.engines.base import Engine
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.evaluator import Cost, Evaluator
from indexcache_search.evaluation.judge import Judge
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.results.tables import with_error
from indexcache_search.strategies.base import Goal, OnPattern, OnStep, Outcome, Problem, Step, Strategy, ignored
from indexcache_search.strategies.swaps import improved
from sglang_indexcache import Pattern


@dataclass(frozen=True)
class LookAlike:
    """`other` costs within noise of `best` on the calibration sequences, and keeps fewer than half of its layers."""

    retention: Fraction
    best: Pattern
    other: Pattern
    difference: Estimate

    def __str__(self) -> str:
        return (
            f"{self.retention}: {self.other} keeps other layers than {self.best} and costs only"
            f" {with_error(self.difference, '+.4f')} more on these sequences; more of them would tell which is better"
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """Results of a strategy, final or so far.

    Attributes:
        strategy: how it was found.
        steps: nested flips, where there are such.
        patterns: by retention; all on the way of `steps`, or better than what is.
        within_budget: the pattern of least loss within a time, if one was asked for.
        look_alikes: other patterns that calibration can't tell from those.
        cost: what all evaluations on the calibration set took.
        algorithm_1: layer-tokens of the paper's Algorithm 1, which runs every layer of every evaluation.
        baseline_loss: the native pattern's loss on the calibration set.
        noise_floor: how far two evaluations of it lie apart, on the first share of the sequences.
        losses: each of these patterns' loss on the whole set.
        increases: over `baseline_loss`, likewise.
    """

    strategy: Strategy
    steps: tuple[Step, ...]
    patterns: Mapping[Fraction, Pattern]
    within_budget: Pattern | None
    look_alikes: tuple[LookAlike, ...]
    cost: Cost
    algorithm_1: int
    baseline_loss: float
    noise_floor: float
    losses: Mapping[Pattern, float]
    increases: Mapping[Pattern, Estimate]


class Search:
    """Runs one strategy on the tokens that choose; `measured` gives matrices of the model, which some ask for."""

    def __init__(
        self,
        engine: Engine,
        calibration: Evaluator,
        strategy: Strategy,
        goal: Goal,
        measured: Callable[[str], NDArray[np.float64] | None] = lambda name: None,
    ) -> None:
        self.strategy, self.goal = strategy, goal
        self.engine, self._native = engine, engine.model.native
        self.data, self._calibration, self._measured = calibration.data, calibration, measured
        self._judge = Judge.racing(calibration) if strategy.race else Judge(calibration)

    def find(
        self, on_step: OnStep = ignored, on_pattern: OnPattern = ignored, notice: Callable[[str], None] = ignored
    ) -> Found:
        """Evaluate the native pattern, and run the strategy; see `Problem` for who hears of what."""
        for rows in (self._judge.shares[0], None):  # the first share soon says what a sequence takes
            self._calibration.evaluations([self._native], rows)
        self._calibration.evaluations([self._native], self._judge.shares[0], repeat=1)  # the difference is noise
        problem = Problem(
            goal=self.goal,
            judge=self._judge,
            engine=self.engine.name,
            measured=self._measured,
            on_step=on_step,
            on_pattern=on_pattern,
            notice=notice,
        )
        outcome = self.strategy.find(problem)
        return self.found(improved(outcome, problem, swaps) if (swaps := self.strategy.swaps) else outcome)

    def found(self, outcome: Outcome) -> Found:
        """Return what is found, or so far, with its losses."""
        steps, patterns, rivals = outcome.steps, outcome.patterns, outcome.rivals
        within = [] if outcome.within_budget is None else [outcome.within_budget]
        data, known = self._calibration.data, [*(step.pattern for step in steps), *patterns.values(), *within]
        evaluations = dict(zip(known, self._calibration.evaluations(known), strict=True))
        baseline = self._calibration.evaluations([self._native])[0]
        return Found(
            strategy=self.strategy,
            steps=steps,
            patterns=dict(patterns),
            within_budget=outcome.within_budget,
            look_alikes=tuple(item for retention in rivals for item in self._look_alikes(retention, patterns, rivals)),
            cost=self._calibration.cost,
            algorithm_1=self.goal.algorithm_1 * len(self._native) * data.tokens.size,
            baseline_loss=estimates.loss(baseline, data).mean,
            noise_floor=self._noise_floor(baseline),
            losses={pattern: estimates.loss(item, data).mean for pattern, item in evaluations.items()},
            increases={pattern: estimates.increase(item, baseline, data) for pattern, item in evaluations.items()},
        )

    def _noise_floor(self, baseline: Evaluation) -> float:
        rows, data = self._judge.shares[0], self._calibration.data
        first, second = baseline.on(rows), self._calibration.recorded(self._native, 1).on(rows)
        return abs(estimates.loss(second, data).mean - estimates.loss(first, data).mean)

    def _look_alikes(
        self, retention: Fraction, patterns: Mapping[Fraction, Pattern], rivals: Mapping[Fraction, list[Pattern]]
    ) -> list[LookAlike]:
        """Return the `rivals` that calibration can't tell from the one found, and that keep other layers."""
        best, alike = patterns[retention], []
        for other in rivals[retention]:
            difference = self._judge.difference(other, best)
            common = len(set(best.full_layers) & set(other.full_layers) - {0})
            wanted = len(best.full_layers) - 1
            if difference.low <= 0 and 2 * common < wanted:
                alike.append(LookAlike(retention, best, other, difference))
        return alike
