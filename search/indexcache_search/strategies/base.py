"""Interface of strategies: their goal, their tools and their outcome."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from indexcache_search.errors import SearchError
from indexcache_search.strategies.budget.layers import Prices
from sglang_indexcache import ModelLayers, Pattern
from sglang_indexcache.pattern_file.file import PrefillSection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from indexcache_search.evaluation.judge import Judge


@dataclass(frozen=True)
class Step:
    """Committed flip of `layer`, giving `pattern` with `loss`.

    `losses` are the losses of flips that ran on all sequences, by layer.
    """

    layer: int
    pattern: Pattern
    loss: float
    losses: dict[int, float]


class BudgetGoal(ABC):
    """A pattern of least loss within a budget, beside those of the retentions.

    Attributes:
        share: of what the checkpoint's own pattern takes.
    """

    share: float

    @abstractmethod
    def section(self) -> dict[str, Any]:
        """Return what `SearchSection` of a pattern file says of the budget, by its field."""


@dataclass(frozen=True, kw_only=True)
class TimeGoal(BudgetGoal):
    """A pattern of least loss that takes at most a time, relative to the checkpoint's own pattern.

    Attributes:
        share: of the prefill time.
        prices: latencies of layers.
        queries: for how many prompt queries at a time an `F` layer may select, besides 1, rising; none if the table
            has no times of such.
        most_full: maximum number of `F` layers, each of which runs its indexer while decoding.
    """

    share: float
    prices: Prices
    queries: tuple[int, ...]
    most_full: int

    def fits(self, pattern: Pattern, native: Pattern) -> bool:
        """Return whether `pattern` takes at most this time."""
        return self.prices.prompt_share(pattern, native) <= self.share + 1e-9

    def section(self) -> dict[str, Any]:
        """See `BudgetGoal.section`."""
        return {
            "prefill": PrefillSection(share=self.share, context=self.prices.context, prices=self.prices.table),
        }


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Goal of a search.

    Attributes:
        native: the checkpoint's own pattern, which shares only locked layers.
        full_layers: number of `F` layers by retention.
        budget: of a further pattern of least loss, such as a time, within which it may have blocks of queries; `None`
            if none is asked for.
    """

    native: Pattern
    full_layers: Mapping[Fraction, int]
    budget: BudgetGoal | None = None

    @property
    def fewest(self) -> int:
        """Number of `F` layers at the smallest retention."""
        return min(self.full_layers.values())

    @property
    def algorithm_1(self) -> int:
        """Number of patterns that the paper's Algorithm 1 evaluates to the smallest retention (Section 3.1.2)."""
        return sum(range(self.fewest, len(self.native.full_layers)))


def ignored(*_: object) -> None:
    """Do nothing where nobody listens."""


OnStep = Callable[[Step, tuple[Step, ...]], None]
OnPattern = Callable[[Fraction, dict[Fraction, Pattern]], None]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Goal of a search, and tools to reach it.

    Attributes:
        goal: goal of the search.
        judge: compares patterns on the calibration set.
        engine: name of the engine, for messages.
        measured: returns a matrix of the model by its name, see `Matrices`; `None` if it can't be measured.
        on_step: called with every committed flip, and all so far.
        on_pattern: called with a retention whose pattern was found, and all patterns so far.
        notice: called with other lines for the user.
    """

    goal: Goal
    judge: Judge
    engine: str
    measured: Callable[[str], NDArray[np.float64] | None]
    on_step: OnStep = ignored
    on_pattern: OnPattern = ignored
    notice: Callable[[str], None] = ignored

    def needed(self, name: str) -> NDArray[np.float64]:
        """Return a matrix that a strategy requires.

        Raises:
            SearchError: if it can't be measured with this engine.
        """
        matrix = self.measured(name)
        if matrix is None:
            raise SearchError(f"--strategy {name} can't be had with {self.engine}, expected another one")
        return matrix


@dataclass(frozen=True)
class Outcome:
    """Patterns that a strategy found.

    Attributes:
        patterns: the patterns by retention.
        steps: nested flips that lead to them; empty for strategies without steps.
        rivals: other patterns that ran on all sequences, by retention, the best first.
        within_budget: the pattern of least loss within `Goal.budget`; `None` if no budget was given.
    """

    patterns: dict[Fraction, Pattern]
    steps: tuple[Step, ...] = ()
    rivals: dict[Fraction, list[Pattern]] = field(default_factory=dict)
    within_budget: Pattern | None = None


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """Method of searching for patterns; its fields are its settings on the command line.

    Attributes:
        name: its name on the command line and in pattern files.
        summary: description for `--help`.
        race: compare patterns on growing shares of the sequences, see `Judge`.
        swaps: swaps per round of the local search that follows, see `swaps.improve`; 0 for none.
        blocks: parts of the layers that are searched in turn, see `greedy`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    race: bool = True
    swaps: int = 0
    blocks: int = field(default=1, init=False)

    @classmethod
    def settings(cls) -> list[str]:
        """Return the names of the settings that can be given."""
        return sorted(item.name for item in fields(cls) if item.init)

    def check(self, goal: Goal) -> None:
        """Check that `goal` can be reached, before any expensive work.

        Raises:
            SearchError: if not.
        """
        for count in goal.full_layers.values():
            if count > len(goal.native.full_layers):
                raise too_many(count, goal.native)

    @abstractmethod
    def find(self, problem: Problem) -> Outcome:
        """Find the patterns of `problem.goal`.

        Raises:
            SearchError: if this engine can't support it.
        """


class BudgetRequest(ABC):
    """A budget that a search is asked for, before the model is known.

    Attributes:
        option: the flag of its option of indexcache-search.
        strategy: finds the pattern within it, in the place of the default strategy.
    """

    option: ClassVar[str]
    strategy: ClassVar[type[Strategy]]

    @abstractmethod
    def goal(self, model: ModelLayers) -> BudgetGoal:
        """Return the goal of a search on `model`.

        Raises:
            SearchError: if the budget is not about such models, or can't be reached.
        """


class DirectStrategy(Strategy):
    """Strategy that finds the pattern of each retention independently."""

    @abstractmethod
    def ranked(self, problem: Problem, retention: Fraction) -> list[Pattern]:
        """Return patterns for one retention, the best first; the others have run on all sequences."""

    def find(self, problem: Problem) -> Outcome:
        """Find the pattern of each retention independently."""
        patterns: dict[Fraction, Pattern] = {}
        rivals: dict[Fraction, list[Pattern]] = {}
        for retention in problem.goal.full_layers:
            patterns[retention], *rivals[retention] = self.ranked(problem, retention)
            problem.judge.losses([patterns[retention]])
            problem.on_pattern(retention, patterns)
        return Outcome(patterns, rivals=rivals)


def by_count(native: Pattern, steps: Sequence[Step]) -> dict[int, Pattern]:
    """Return `native` and the pattern after each step, by the number of `F` layers."""
    return {len(pattern.full_layers): pattern for pattern in (native, *(step.pattern for step in steps))}


def too_many(count: int, native: Pattern) -> SearchError:
    """Return the error for more `F` layers than the model has."""
    available, what = len(native.full_layers), "are there" if native.dense else "have an indexer"
    return SearchError(f"{count} {native.full_role} layers were asked for, but only {available} layers {what}")
