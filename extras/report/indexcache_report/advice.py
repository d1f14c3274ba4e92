"""Advice which pattern to take: the fastest that loses little enough on its hardest source."""

from __future__ import annotations

import math
from dataclasses import dataclass

from indexcache_report.points import Frontier, Point
from indexcache_search.results.variant import BASELINE

ALLOWANCES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ALLOWANCE = 0.1  # nats a token: it becomes exp(-0.1), about 10 %, less likely


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A pattern to take.

    Attributes:
        allowance: nats a token that may be lost on the hardest source.
        context: tokens of the prompts whose speed counts; `None` if no speed is known.
        point: the pattern; `None` if none that is faster than the baseline loses so little.
        faster: the next faster pattern, which loses more; `None` if there is none.
        closest: the pattern faster than the baseline that loses least; `None` if there is none.
        possible: where none is to be taken, the one of those that are faster that loses least of those which may be
            within the allowance after all; `None` if none may be.
        compared: how many patterns are faster than the baseline.
    """

    allowance: float
    context: int | None
    point: Point | None
    faster: Point | None
    closest: Point | None
    possible: Point | None
    compared: int

    @property
    def unsettled(self) -> bool:
        """True if the pattern to take may lose more than the allowance after all, or one that is left may not."""
        if self.point is None:
            return self.possible is not None
        return not highest(self.point) <= self.allowance


def highest(point: Point) -> float:
    """Return what a point loses at most on its hardest source, as far as is known; infinite if an error is unknown."""
    return max(increase.high for increase in point.increases.values())


def lowest(point: Point) -> float:
    """Return what a point loses at least on its hardest source, likewise; minus infinity if an error is unknown."""
    return max(increase.low for increase in point.increases.values())


def choose(frontier: Frontier, context: int | None, allowance: float) -> Advice:
    """Choose the fastest pattern whose hardest source loses at most `allowance`, of equally fast ones the best."""

    def speed(point: Point) -> float:
        value = frontier.speed(point, context)
        assert value is not None
        return round(value, 6)

    shown = frontier.shown(context)
    base = next(point for point in shown if point.kind == BASELINE)
    rivals = [point for point in shown if speed(point) > speed(base)]
    within = [point for point in rivals if point.worst.mean <= allowance]
    point = max(within, key=lambda item: (speed(item), -item.worst.mean), default=None)
    possible = [item for item in rivals if point is None and lowest(item) <= allowance]
    above = [item for item in rivals if point is not None and speed(item) > speed(point)]
    return Advice(
        allowance=allowance,
        context=context,
        point=point,
        faster=min(above, key=lambda item: (speed(item), item.worst.mean), default=None),
        closest=min(rivals, key=lambda item: item.worst.mean, default=None),
        possible=min(possible, key=lambda item: item.worst.mean, default=None),
        compared=len(rivals),
    )


def less_likely(nats: float) -> str:
    """Say what a loss means: by how much a token becomes less likely, as the geometric mean."""
    return f"{100 * -math.expm1(-nats):.0f} %"
