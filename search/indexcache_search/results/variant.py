"""Variants, the lines of a comparison. Their names are for display only."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from indexcache_search.evaluation.losses import Losses
from indexcache_search.evaluation.plan import Plan
from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.pattern import uniform_pattern

Kind = Literal["baseline", "named", "phase", "mean", "best"]
"""`named`: requested by the user or found by a search. `phase`: uniform at one phase; `mean`, `best`: over phases."""

BASELINE: Kind = "baseline"
NAMED: Kind = "named"
PHASE: Kind = "phase"
MEAN: Kind = "mean"
BEST: Kind = "best"
IN_TIME, IN_BYTES = ", in time", ", in bytes"  # behind the strategy's name, of a pattern found for `Goal.budget`


@dataclass(frozen=True)
class Variant:
    """One line of a comparison.

    Attributes:
        kind: kind of variant.
        name: name for display.
        retention: requested share of layers that are not shared; `None` for a server, whose pattern is unknown.
        pattern: the plan that runs; `None` for a server.
        phase: the layer at which uniform's F layers begin, see `Pattern.uniform`.
        served: flags by which a server is told to run it, as somebody named it; `None` for one of no name of its own.
    """

    kind: Kind
    name: str
    retention: Fraction | None
    pattern: Plan | None
    phase: int | None = None
    served: str | None = None

    @property
    def letters(self) -> Pattern | None:
        """Its plan, if that is a pattern of letters; `None` for a server, too."""
        return None if self.pattern is None else self.pattern.pattern

    @classmethod
    def baseline(cls, pattern: Pattern | None) -> Variant:
        """Return the baseline's line."""
        return cls(BASELINE, "baseline", None if pattern is None else Fraction(1), pattern)


@dataclass(frozen=True)
class VariantLosses:
    """One line of the held-out comparison, and what was measured."""

    line: Variant
    evaluation: Losses


def own_names(strategy: str) -> tuple[str, ...]:
    """Return the names of the lines whose patterns a search has found."""
    return strategy, f"{strategy}{IN_TIME}", f"{strategy}{IN_BYTES}"


def uniform_lines(native: Pattern, retention: Fraction, more: str = "") -> list[Variant]:
    """Return uniform at every phase, each pattern once; none unless retention is 1/n and locked layers allow it.

    `more` is appended to the names.
    """
    lines: list[Variant] = []
    for phase in range(retention.denominator):
        try:
            pattern = uniform_pattern(native, retention, phase)
        except PatternError:
            continue
        if pattern in [line.pattern for line in lines]:  # locked layers may map two phases to the same free layers
            continue
        lines.append(Variant(PHASE, f"uniform phase {phase}{more}", retention, pattern, phase))
    return lines
