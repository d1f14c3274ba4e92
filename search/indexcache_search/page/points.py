"""Patterns as points: how much each loses, and how fast each is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.prices.table import PriceTable, known
from indexcache_search.results import tables
from indexcache_search.results.held_out import HeldOut, Row
from indexcache_search.results.variant import BASELINE, NAMED, PHASE, Kind
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE

Source = Literal["measured", "estimated"]


@dataclass(frozen=True)
class Speed:
    """Speed of prompts, of which 1 is the baseline's, with an interval; `ms` is the time, where it was measured."""

    value: float
    low: float
    high: float
    ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """A pattern or server.

    Attributes:
        names: its names; several if the same pattern was found in several ways.
        kind: see `Kind`.
        pattern: its letters; `None` for a server.
        retention: as in `Row`.
        full_layers: number of layers that are not shared; `None` for a server.
        increases: loss above the baseline's in nats a token, by source.
        speeds: by tokens of a prompt; empty if unknown.
    """

    names: tuple[str, ...]
    kind: Kind
    pattern: str | None
    retention: str | None
    full_layers: int | None
    increases: Mapping[str, Estimate]
    speeds: Mapping[int, Speed] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """All names in one line."""
        return " = ".join(self.names)

    @cached_property
    def hardest(self) -> str:
        """The source that loses most; one whose loss is no number counts as that."""
        return max(self.increases, key=lambda name: _or_infinite(self.increases[name].mean))

    @property
    def worst(self) -> Estimate:
        """Increase on the hardest source."""
        return self.increases[self.hardest]

    @property
    def finite(self) -> bool:
        """Whether every increase is a number."""
        return all(math.isfinite(increase.mean) for increase in self.increases.values())


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Points to choose from, the baseline first.

    Attributes:
        points: all of them.
        sources: names of the sources.
        contexts: tokens of the prompts for which speeds are known, rising; empty if none are: then fewer layers that
            are not shared count as faster.
        speeds: whether speeds were measured or estimated.
        words: whose times they are.
        largest_error: of estimates, how far they were from whole prompts that were measured; `None` if unknown.
    """

    points: tuple[Point, ...]
    sources: tuple[str, ...]
    contexts: tuple[int, ...] = ()
    speeds: Source = "estimated"
    words: str = ""
    largest_error: float | None = None

    def speed(self, point: Point, context: int | None) -> float | None:
        """Return what orders points by their speed, the larger the faster; `None` if it is unknown."""
        if context is None:
            return None if point.full_layers is None else float(-point.full_layers)
        return point.speeds[context].value if context in point.speeds else None

    def shown(self, context: int | None) -> list[Point]:
        """Return the points that a figure has room for: with a speed, and losses that are numbers."""
        return [point for point in self.points if point.finite and self.speed(point, context) is not None]

    def best(self, context: int | None) -> list[Point]:
        """Return the points of which none is as fast and loses less on its hardest source, the fastest first."""
        found: list[Point] = []
        for point in sorted(
            self.shown(context), key=lambda item: (-(self.speed(item, context) or 0.0), item.worst.mean)
        ):
            if not found or point.worst.mean < found[-1].worst.mean:
                found.append(point)
        return found


def estimated(held_out: HeldOut) -> Frontier | None:
    """Return the patterns of a table with estimated speeds; `None` for fewer than two, and for plans of a study."""
    if any(row.extra for row in held_out.rows):
        return None  # what a study saves is in columns of its own
    points = _points(held_out)
    frontier = Frontier(points=points, sources=tuple(held_out.sources))
    if held_out.prices is not None:
        context, error = held_out.prices.context, None
        speeds = [_stated(row, context) for row in _rows(held_out)]
        table = PriceTable.load(held_out.prices.table) if held_out.prices.table in known() else None
        if table is not None:
            error = table.largest_error
            native = next(row.pattern for row in held_out.rows if row.kind == BASELINE)
            reckoned = [_reckoned(row, str(native), table) for row in _rows(held_out)]
            if all(
                _agree(of_row.get(context), row.prefill) for of_row, row in zip(reckoned, _rows(held_out), strict=True)
            ):
                speeds = reckoned
        by_pattern = {row.pattern: speed for row, speed in zip(_rows(held_out), speeds, strict=True)}
        contexts = sorted({item for of_row in speeds for item in of_row})
        frontier = replace(
            frontier,
            points=tuple(
                replace(point, speeds=_spread(by_pattern[point.pattern], point.kind, error)) for point in points
            ),
            contexts=tuple(contexts),
            words=held_out.prices.words,
            largest_error=error,
        )
    return frontier if len(frontier.shown(max(frontier.contexts, default=None))) > 1 else None


class Spread(Protocol):
    """A time in milliseconds, with an interval."""

    @property
    def median(self) -> float: ...  # noqa: D102

    @property
    def low(self) -> float: ...  # noqa: D102

    @property
    def high(self) -> float: ...  # noqa: D102


class Timed(Protocol):
    """Times of a server at one context and concurrency."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def context(self) -> int: ...  # noqa: D102

    @property
    def concurrency(self) -> int: ...  # noqa: D102

    @property
    def first_token_ms(self) -> Spread: ...  # noqa: D102


def measured(held_out: HeldOut, times: Sequence[Timed], words: str) -> Frontier | None:
    """Return the servers of a table with measured speeds: the time to the first token at the lowest concurrency.

    The interval of a speed is the baseline's median over the ends of the server's own interval.

    Args:
        held_out: the table.
        times: a row for each name of the table and each context.
        words: what they were measured on.
    """
    lowest = min((row.concurrency for row in times), default=0)
    by_name = {(row.name, row.context): row.first_token_ms for row in times if row.concurrency == lowest}
    points = _points(held_out)
    first = points[0].names[0]

    def speed(name: str, context: int) -> Speed:
        base, own = by_name[first, context], by_name[name, context]
        return Speed(base.median / own.median, base.median / own.high, base.median / own.low, own.median)

    contexts = sorted({context for name, context in by_name if name == first})
    timed = [
        replace(
            point,
            speeds={item: speed(point.names[0], item) for item in contexts if (point.names[0], item) in by_name},
        )
        for point in points
    ]
    frontier = Frontier(
        points=tuple(timed),
        sources=tuple(held_out.sources),
        contexts=tuple(contexts),
        speeds="measured",
        words=words,
    )
    return frontier if contexts and len(frontier.shown(contexts[-1])) > 1 else None


def _rows(held_out: HeldOut) -> list[Row]:
    """Return the rows that are patterns or servers, not summaries of several."""
    return [row for row in held_out.rows if row.kind in (BASELINE, NAMED, PHASE)]


def _points(held_out: HeldOut) -> tuple[Point, ...]:
    """Make points, one for rows of the same pattern: the baseline first, what was named before phases of uniform."""
    found: dict[object, Point] = {}
    for kind in (BASELINE, NAMED, PHASE):
        for row in _rows(held_out):
            if row.kind != kind:
                continue
            merged = row.pattern is not None and not set(row.pattern) & {DENSE, "|"}  # letters say all that it is
            key: object = row.pattern if merged else (row.kind, row.name, row.retention)
            if key in found:
                found[key] = replace(found[key], names=(*found[key].names, _name(row)))
            else:
                found[key] = Point(
                    names=(_name(row),),
                    kind=row.kind,
                    pattern=row.pattern,
                    retention=row.retention,
                    full_layers=row.full_layers,
                    increases={name: row.by_source[name].increase for name in held_out.sources},
                )
    return tuple(found.values())


def _name(row: Row) -> str:
    if row.kind != PHASE:
        return tables.label(row)
    return f"uniform {row.retention}" + (f", phase {row.phase}" if row.phase else "")


def _stated(row: Row, context: int) -> dict[int, float]:
    return {} if row.prefill is None else {context: 1 / row.prefill}


def _reckoned(row: Row, native: str, table: PriceTable) -> dict[int, float]:
    """Return speeds at all contexts of the table; none for a pattern without a price."""
    if row.prefill is None or row.pattern is None:
        return {}
    pattern, own = Pattern.parse(row.pattern), Pattern.parse(native)
    return {context: 1 / table.at(context).prompt_share(pattern, own) for context in table.contexts}


def _agree(speed: float | None, prefill: float | None) -> bool:
    """Tell whether a speed is what the row says, which was rounded; a file may have the name of another table."""
    return (speed is None) == (prefill is None) and (speed is None or abs(1 / speed - (prefill or 0.0)) < 1e-3)


def _spread(speeds: Mapping[int, float], kind: Kind, error: float | None) -> dict[int, Speed]:
    share = 0.0 if kind == BASELINE or error is None else error
    return {context: Speed(value, value * (1 - share), value * (1 + share)) for context, value in speeds.items()}


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
