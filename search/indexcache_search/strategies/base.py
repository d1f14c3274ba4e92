"""What a strategy is given, what it gives, and what is known of it before anything runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from indexcache_search.evaluation.judge import Judge


@dataclass(frozen=True)
class Step:
    """One committed flip of `layer`, giving `pattern` with `loss`.

    `losses` are those of the flips that ran on all sequences.
    """

    layer: int
    pattern: Pattern
    loss: float
    losses: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a search is asked for.

    Attributes:
        native: the checkpoint's own pattern: nothing is shared but locked layers.
        full_layers: how many `F` layers each retention keeps.
        blocks: see `greedy`.
        flips: how many flips a lazy step evaluates at least.
        prices: what an `F` layer costs, by how many prompt queries it selects for at a time, 1 among them; empty where
            all layers select for each query by itself. Patterns with prices may have other numbers of `F` layers than
            `full_layers`, for together as much.
        most_full: how many `F` layers such patterns have at most, for each of them runs its indexer while decoding;
            `None` if that does not matter.
    """

    native: Pattern
    full_layers: Mapping[Fraction, int]
    blocks: int = 1
    flips: int = 1
    prices: Mapping[int, float] = field(default_factory=dict)
    most_full: int | None = None

    @property
    def fewest(self) -> int:
        """`F` layers at the smallest retention."""
        return min(self.full_layers.values())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A goal, and what helps to reach it.

    Attributes:
        goal: what is asked for.
        judge: compares patterns on the calibration set.
        engine: name of what evaluates, for people.
        measured: a matrix of the model by its name, see `Matrices`; None where it can't be measured.
        on_step: told of every committed flip, and of all so far.
        on_pattern: told of a retention whose pattern was found, and of all so far.
        notice: told what else is worth a line.
    """

    goal: Goal
    judge: Judge
    engine: str
    measured: Callable[[str], NDArray[np.float64] | None]
    on_step: Callable[[Step, tuple[Step, ...]], None]
    on_pattern: Callable[[Fraction, dict[Fraction, Pattern]], None]
    notice: Callable[[str], None]

    def needed(self, name: str) -> NDArray[np.float64]:
        """A matrix that a strategy can't do without.

        Raises:
            SearchError: if it can't be measured with this engine.
        """
        matrix = self.measured(name)
        if matrix is None:
            raise SearchError(f"--strategy {name} can't be had with {self.engine}, expected another one")
        return matrix


@dataclass(frozen=True)
class Outcome:
    """What a strategy found.

    Attributes:
        patterns: by retention.
        steps: nested flips that lead to them; none where a pattern was found at once.
        rivals: other patterns that ran on all sequences, by retention, the best first.
        plain: where indexers have prices, the best pattern found for as much without blocks of queries.
    """

    patterns: dict[Fraction, Pattern]
    steps: tuple[Step, ...] = ()
    rivals: dict[Fraction, list[Pattern]] = field(default_factory=dict)
    plain: dict[Fraction, Pattern] = field(default_factory=dict)


class Strategy(ABC):
    """A way to look for patterns.

    Attributes:
        name: what it is called on the command line and in pattern files.
        summary: what it evaluates, for `--help`.
        settings: of `Settings`, which it reads; with race it compares patterns on growing shares of the sequences.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ("race", "swaps")

    def check(self, goal: Goal) -> None:
        """Check that `goal` can be reached, before anything expensive.

        Raises:
            SearchError: if not.
        """
        for count in goal.full_layers.values():
            if count > len(goal.native.full_layers):
                raise too_many(count, goal.native)

    def planned(self, goal: Goal) -> int | None:
        """Patterns that will run on all sequences; None where that depends on what is found."""
        return None

    @abstractmethod
    def find(self, problem: Problem) -> Outcome:
        """Look for the patterns of `problem.goal`.

        Raises:
            SearchError: if it can't be done with this engine.
        """


class DirectStrategy(Strategy):
    """Finds the pattern of each retention by itself."""

    @abstractmethod
    def ranked(self, problem: Problem, retention: Fraction) -> list[Pattern]:
        """Patterns for one retention, the best first; those behind it have run on all sequences."""

    def find(self, problem: Problem) -> Outcome:
        return find_each(problem, lambda retention: self.ranked(problem, retention))


def by_count(native: Pattern, steps: Sequence[Step]) -> dict[int, Pattern]:
    """`native` and what each step left of it, by the number of `F` layers."""
    return {len(pattern.full_layers): pattern for pattern in (native, *(step.pattern for step in steps))}


def too_many(count: int, native: Pattern) -> SearchError:
    """More layers were to share nothing than can."""
    available, what = len(native.full_layers), "are there" if native.dense else "have an indexer"
    return SearchError(f"{count} {native.full_role} layers were asked for, but only {available} layers {what}")


def find_each(problem: Problem, ranked: Callable[[Fraction], list[Pattern]]) -> Outcome:
    """The outcome of finding each retention's pattern by itself; see `DirectStrategy.ranked`."""
    patterns: dict[Fraction, Pattern] = {}
    rivals: dict[Fraction, list[Pattern]] = {}
    for retention in problem.goal.full_layers:
        patterns[retention], *rivals[retention] = ranked(retention)
        problem.judge.losses([patterns[retention]])
        problem.on_pattern(retention, patterns)
    return Outcome(patterns, rivals=rivals)
