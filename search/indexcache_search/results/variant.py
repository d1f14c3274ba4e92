"""What a line of a comparison is; names are for people, and decide nothing."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from indexcache_search.evaluation.plan import Plan
from sglang_indexcache import Pattern
from sglang_indexcache.errors import PatternError
from sglang_indexcache.pattern import uniform_pattern

Kind = Literal["baseline", "named", "phase", "mean", "best"]
"""`named`: what somebody asked for or a search found. `phase`: uniform at one phase; `mean`, `best`: over phases."""

BASELINE: Kind = "baseline"
NAMED: Kind = "named"
PHASE: Kind = "phase"
MEAN: Kind = "mean"
BEST: Kind = "best"


@dataclass(frozen=True)
class Line:
    """One line of a comparison.

    Attributes:
        kind: what it is.
        name: for people.
        retention: share of layers that are not shared, as it was asked for; `None` of a server, whose pattern is its
            own affair.
        pattern: what runs; `None` of a server.
        phase: the layer at which uniform's F layers begin, see `Pattern.uniform`.
    """

    kind: Kind
    name: str
    retention: Fraction | None
    pattern: Plan | None
    phase: int | None = None

    @classmethod
    def baseline(cls, pattern: Pattern | None) -> Line:
        return cls(BASELINE, "baseline", None if pattern is None else Fraction(1), pattern)


def uniform_lines(native: Pattern, retention: Fraction, more: str = "") -> list[Line]:
    """Uniform at every phase, each pattern once; none where the retention is not 1/n, or too large for locked layers.

    `more` goes behind the names.
    """
    lines: list[Line] = []
    for phase in range(retention.denominator):
        try:
            pattern = uniform_pattern(native, retention, phase)
        except PatternError:
            continue
        if pattern in [line.pattern for line in lines]:  # of locked layers, the nearest free ones may be the same
            continue
        lines.append(Line(PHASE, f"uniform phase {phase}{more}", retention, pattern, phase))
    return lines
