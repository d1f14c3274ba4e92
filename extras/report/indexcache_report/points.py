"""Patterns as points: how much each loses, and how fast each is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results import tables
from indexcache_search.results.schema import HeldOut, PricesResult, Row, SpeedRow
from indexcache_search.results.variant import BASELINE, NAMED, PHASE, Kind
from indexcache_search.strategies.budget.table import LatencyTable, known
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE

Source = Literal["measured", "estimated"]


@dataclass(frozen=True)
class Speed:
    """Speed of prompts, of which 1 is the baseline's, with an interval.

    `ms` is the time, where it was measured, or estimated for the whole model.
    """

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
        full_layers: number of layers that are not shared; `None` for a server.
        served: flags by which a server is told to run it; `None` if no file or letters say all that it is.
        increases: loss above the baseline's in nats a token, by source.
        speeds: by tokens of a prompt; empty if unknown.
    """

    names: tuple[str, ...]
    kind: Kind
    pattern: str | None
    full_layers: int | None
    increases: Mapping[str, Estimate]
    speeds: Mapping[int, Speed]
    served: str | None = None

    @property
    def name(self) -> str:
        """All names in one line."""
        return " = ".join(self.names)

    @cached_property
    def hardest(self) -> str:
        """The source that loses most; one whose loss is NaN or infinite counts as that."""
        return max(self.increases, key=lambda name: _or_infinite(self.increases[name].mean))

    @property
    def worst(self) -> Estimate:
        """Increase on the hardest source."""
        return self.increases[self.hardest]

    @property
    def finite(self) -> bool:
        """True if every increase is finite."""
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

    @property
    def dense(self) -> bool:
        """True if the patterns are of a dense model."""
        return DENSE in (self.points[0].pattern or "")

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
    """Return the patterns of a table with the speeds that its prices give; see `_whole`."""
    groups, prices = _groups(held_out), held_out.prices
    speeds, error = _estimates([rows[0] for rows in groups], prices)
    took = _baseline_ms(groups[0][0], prices, {context for known_speeds in speeds for context in known_speeds})
    points = [
        _point(
            rows,
            {
                context: _interval(value, rows[0].kind, error, took.get(context))
                for context, value in known_speeds.items()
            },
        )
        for rows, known_speeds in zip(groups, speeds, strict=True)
    ]
    frontier = Frontier(
        points=tuple(points),
        sources=tuple(held_out.sources),
        contexts=tuple(sorted({context for known_speeds in speeds for context in known_speeds})),
        words="" if prices is None else f"sums of the times of layers of {prices.words}",
        largest_error=error,
    )
    return _whole(held_out, frontier)


def timed(held_out: HeldOut, times: Sequence[SpeedRow]) -> Frontier | None:
    """Return the patterns or servers of a table with speeds from rows of times; see `_whole`.

    Speed is the gain by TTFT, at the lowest concurrency.

    Args:
        held_out: the table.
        times: rows of its names, all measured or all estimated.
    """
    if not times:
        return None
    lowest = min(row.concurrency for row in times)
    by_row: dict[tuple[str, str | None], dict[int, Speed]] = {}
    for row in times:
        if row.concurrency == lowest:
            by_row.setdefault((row.name, row.retention), {})[row.context] = _speed(row)
    points = [_point(rows, by_row.get((rows[0].name, rows[0].retention), {})) for rows in _groups(held_out)]
    frontier = Frontier(
        points=tuple(points),
        sources=tuple(held_out.sources),
        contexts=tuple(sorted(points[0].speeds)),
        speeds=times[0].source,
        words=times[0].basis,
    )
    return _whole(held_out, frontier) if frontier.contexts else None


def _whole(held_out: HeldOut, frontier: Frontier) -> Frontier | None:
    """Return `frontier` if there is something to choose: at least one pattern beside the baseline, none of a study."""
    if any(row.extra for row in held_out.rows):
        return None  # what a study saves is in columns of its own
    shown = frontier.shown(max(frontier.contexts, default=None))
    return frontier if len(shown) > 1 and shown[0].kind == BASELINE else None


def _groups(held_out: HeldOut) -> list[list[Row]]:
    """Return the rows that are patterns or servers, those of the same pattern together.

    The baseline comes first, and what has a name before phases of uniform.
    """
    found: dict[object, list[Row]] = {}
    for kind in (BASELINE, NAMED, PHASE):
        for row in held_out.rows:
            if row.kind == kind:
                letters = row.pattern is not None and not set(row.pattern) & {DENSE, "|"}  # they say all that it is
                found.setdefault(row.pattern if letters else (row.kind, row.name, row.retention), []).append(row)
    return list(found.values())


def _point(rows: Sequence[Row], speeds: Mapping[int, Speed]) -> Point:
    first = rows[0]
    return Point(
        names=tuple(map(_name, rows)),
        kind=first.kind,
        pattern=first.pattern,
        full_layers=first.full_layers,
        increases={name: measured.increase for name, measured in first.by_source.items()},
        speeds=speeds,
        served=next((row.served for row in rows if row.served is not None), None),
    )


def _name(row: Row) -> str:
    if row.kind != PHASE:
        return tables.label(row)
    return f"uniform {row.retention}" + (f", phase {row.phase}" if row.phase else "")


def _estimates(rows: Sequence[Row], prices: PricesResult | None) -> tuple[list[dict[int, float]], float | None]:
    """Return the speeds of each row by context, the baseline first, and how far such estimates were from measurements.

    At other contexts than that of the rows they are known where the table is one of the package.
    """
    if prices is None:
        return [{} for _ in rows], None
    stated = [{} if row.prefill is None else {prices.context: 1 / row.prefill} for row in rows]
    if prices.table not in known():
        return stated, None
    table, native = LatencyTable.load(prices.table), Pattern.parse(str(rows[0].pattern))
    reckoned = [
        {
            context: 1 / table.at(context).prompt_share(Pattern.parse(str(row.pattern)), native)
            for context in table.contexts
        }
        if speeds
        else {}
        for row, speeds in zip(rows, stated, strict=True)
    ]
    pairs = zip(reckoned, stated, strict=True)
    if any(
        abs(1 / other.get(context, math.inf) - 1 / value) > 1e-3
        for other, own in pairs
        for context, value in own.items()
    ):
        return stated, None  # a file had the name of that table
    return reckoned, table.largest_error


def _baseline_ms(row: Row, prices: PricesResult | None, contexts: Collection[int]) -> dict[int, float]:
    """Return the baseline's time by context, where it is known for the whole model."""
    if prices is None or prices.baseline_ms is None:
        return {}
    if set(contexts) <= {prices.context}:
        return {prices.context: prices.baseline_ms}
    table, native = LatencyTable.load(prices.table), Pattern.parse(str(row.pattern))
    return {context: table.at(context).prompt_ms(native) for context in contexts}


def _interval(value: float, kind: Kind, error: float | None, baseline_ms: float | None) -> Speed:
    share = 0.0 if kind == BASELINE or error is None else error
    time = None if baseline_ms is None else baseline_ms / value
    return Speed(value, value * (1 - share), value * (1 + share), time)


def _speed(row: SpeedRow) -> Speed:
    time = row.first_token_ms.median if row.source == "measured" else None
    if row.gain is None:
        return Speed(1.0, 1.0, 1.0, time)
    gain = row.gain.first_token
    low, high = (gain.median if end is None else end for end in (gain.low, gain.high))
    return Speed(gain.median, low, high, time)


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
