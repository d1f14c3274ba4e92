"""Speed as a table beside the loss, for terminals and pages."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from indexcache_search.results import tables
from indexcache_search.results.schema import HeldOut, SpeedRow, Spread
from indexcache_search.results.variant import BASELINE

LEADING = 2  # columns that say what a line is of


def title(speed: Sequence[SpeedRow]) -> str:
    """Say how the speed is known, and on what it rests."""
    first, known = speed[0], str(speed[0].source)
    if first.turns is not None:
        known += f", median of {first.turns} turns (smallest to largest)"
    return f"Speed beside loss: {known}; {first.basis}"


def lines(speed: Sequence[SpeedRow], held_out: HeldOut) -> list[list[str]]:
    """Return the titles of the columns, then a line for each row of `speed` that the table of losses shows."""
    shown = {(row.name, row.retention): row for row in tables.shown_rows(held_out)}
    several = any(row.concurrency > 1 for row in speed)
    found = [["pattern", "prompt", *(["requests"] if several else []), "increase", *_titles(speed, several)]]
    for item in speed:
        row = shown.get((item.name, item.retention))
        if row is None:
            continue
        requests = [str(item.concurrency)] if several else []
        increase = "" if row.kind == BASELINE else tables.with_error(row.increase, "+.4f")
        found.append(
            [tables.label(row), tables.tokens(item.context), *requests, increase, *_cells(item, speed, several)]
        )
    return found


def terminal_tables(speed: Sequence[SpeedRow], held_out: HeldOut, width: int) -> list[Table]:
    """Lay out the table for `width` columns; empty without rows."""
    if not speed:
        return []
    content = lines(speed, held_out)
    return tables.fitted(title(speed), content, LEADING, width, [line[1] for line in content[1:]])


def _titles(speed: Sequence[SpeedRow], several: bool) -> list[str]:
    titles = ["TTFT, ms", *(["90 %", "99 %"] if several else []), "gain"]
    if any(row.token_ms for row in speed):
        titles += ["TPOT, ms", "gain"]
    if any(row.tokens_per_second for row in speed):
        titles += ["tokens/s", "gain"]
    return titles


def _cells(item: SpeedRow, speed: Sequence[SpeedRow], several: bool) -> list[str]:
    gain, percentiles = dict(item.gain or ()), item.first_token_percentiles or {}
    cells = [_times(item.first_token_ms)]
    cells += [_number(percentiles[share]) if percentiles else "" for share in ("90", "99")] if several else []
    cells.append(_gain(gain.get("first_token")))
    if any(row.token_ms for row in speed):
        cells += [_times(item.token_ms), _gain(gain.get("token"))]
    if any(row.tokens_per_second for row in speed):
        cells += [_times(item.tokens_per_second), _gain(gain.get("throughput"))]
    return cells


def _times(spread: Spread | None) -> str:
    if spread is None or spread.low is None or spread.high is None:
        return "" if spread is None else _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.low)} to {_number(spread.high)})"


def _gain(spread: Spread | None) -> str:
    if spread is None or spread.low is None or spread.high is None:
        return "" if spread is None else f"{spread.median:.2f}x"
    return f"{spread.median:.2f}x ({spread.low:.2f} to {spread.high:.2f})"


def _number(value: float) -> str:
    """Write a number with three digits that count, or more before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
