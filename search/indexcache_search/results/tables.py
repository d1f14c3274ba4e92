"""The held-out comparison as a table for terminals and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results.schema import HeldOut, Row
from indexcache_search.results.variant import BASELINE, PHASE
from sglang_indexcache.pattern import FULL


def extras(held_out: HeldOut) -> list[str]:
    """Return the titles of a study's additional columns; none where patterns alone are compared."""
    return list(dict.fromkeys(title for row in held_out.rows for title in row.extra or ()))


def shown_rows(held_out: HeldOut) -> list[Row]:
    """Return the rows to show: phases other than the paper's appear only as their mean and best."""
    shown = [row for row in held_out.rows if row.kind != PHASE or row.phase == 0]
    order = {retention: index for index, retention in enumerate(dict.fromkeys(row.retention for row in shown))}
    return sorted(shown, key=lambda row: (order[row.retention], row.increase.mean))


def columns(held_out: HeldOut) -> list[str]:
    """Return column titles; a source shows accuracy if it has a loss mask, else the increase of the loss."""
    if more := extras(held_out):
        return ["plan", *more, "loss", "increase", "KL", *map(short, held_out.sources)]
    letter = next((row.pattern[0] for row in held_out.rows if row.pattern), FULL)
    speed = [] if held_out.prices is None else [tokens(held_out.prices.context)]
    kept = ["kept", letter] if _of_patterns(held_out) else []
    return ["pattern", *kept, *speed, "loss", "increase", *(short(source) for source in held_out.sources)]


def cells(row: Row, held_out: HeldOut) -> list[str]:
    """Return one row's texts, in the order of `columns`."""
    name = "uniform (paper's phase)" if row.kind == PHASE else str(row.name)
    full = "" if row.full_layers is None else str(row.full_layers)
    kept = [row.retention or "", full] if _of_patterns(held_out) else []
    if held_out.prices is not None:
        kept.append("" if row.prefill is None else f"{1 / row.prefill:.2f}x")
    if row.extra is not None:
        kept = [with_error(row.extra[title], ".3f") if title in row.extra else "" for title in extras(held_out)]
    values = [name, *kept, f"{row.loss.mean:.4f}"]
    values.append("" if row.kind == BASELINE else with_error(row.increase, "+.4f"))
    if row.extra is not None:
        values.append("" if row.kind == BASELINE or row.kl is None else with_error(row.kl, ".4f"))
    for source in held_out.sources:
        measured = row.by_source[source]
        if source in held_out.answer_sources:
            values.append(with_error(measured.accuracy, ".3f"))
        elif row.kind == BASELINE:
            values.append(f"{measured.loss.mean:.4f}")
        else:
            values.append(with_error(measured.increase, "+.4f"))
    return values


def _of_patterns(held_out: HeldOut) -> bool:
    """Return whether patterns are compared; servers may have any."""
    return any(row.full_layers is not None for row in held_out.rows)


def tokens(count: int) -> str:
    """Write a number of tokens, in units of 1,024 where it is whole."""
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count:,}"


def speed_line(held_out: HeldOut) -> str:
    """Say what the column of speeds is; nothing where there is none."""
    prices = held_out.prices
    if prices is None:
        return ""
    whole = "" if prices.baseline_ms is None else f" (1x is {prices.baseline_ms:,.0f} ms for the whole model)"
    return f"{tokens(prices.context)}: prefill speed for as many tokens{whole}, by the times of {prices.words}"


def label(row: Row) -> str:
    """Return a row's name, followed by its retention unless that is 1."""
    return f"{row.name} {row.retention}" if row.retention not in (None, "1") else str(row.name)


def terminal_tables(held_out: HeldOut, width: int) -> list[Table]:
    """Lay out the comparison for `width` columns; sources show standard errors if one table is enough."""
    shown = shown_rows(held_out)
    lines = [columns(held_out), *(cells(row, held_out) for row in shown)]
    accuracy = "with a loss mask: accuracy" if held_out.answer_sources else ""
    title = "Held-out comparison: loss, its increase over the baseline" + (accuracy and f"; sources {accuracy}")
    groups = [row.retention for row in shown]
    name = 1 if extras(held_out) or not _of_patterns(held_out) else 2
    tables = fitted(title, lines, name, width, groups)
    if len(tables) == 1:
        return tables
    first = len(lines[0]) - len(held_out.sources)
    sources = [[*line[:name], *(text.partition(" ±")[0] for text in line[first:])] for line in lines]
    by_source = f"By source: increase of the loss{accuracy and f'; {accuracy}'}. A wider terminal has ± as well."
    lines = [line[:first] for line in lines]
    return [*fitted(title, lines, name, width, groups), *fitted(by_source, sources, name, width, groups)]


def fitted(
    title: str, lines: Sequence[Sequence[str]], name: int, width: int, groups: Sequence[object] = ()
) -> list[Table]:
    """Lay out a table for a terminal, split into several if it is too wide; cells are no markup.

    Args:
        title: title of the first table.
        lines: titles of the columns, then the rows.
        name: number of leading columns that every table repeats.
        width: columns of the terminal.
        groups: group of each row; lines separate groups.
    """
    parts: list[list[int]] = []
    for column in range(name, len(lines[0])):
        if not parts or _width(lines, [*parts[-1], column]) > width:
            parts.append([*range(name)])
        parts[-1].append(column)
    return [_table(title if number == 0 else "", lines, part, groups) for number, part in enumerate(parts)]


def _width(lines: Sequence[Sequence[str]], part: Sequence[int]) -> int:
    """Return the width of a table of some columns, borders included."""
    return 1 + sum(3 + max(cell_len(line[column]) for line in lines) for column in part)


def _table(title: str, lines: Sequence[Sequence[str]], part: Sequence[int], groups: Sequence[object]) -> Table:
    table = Table(title=Text(title) if title else None)
    for column in part:
        table.add_column(Text(lines[0][column]), justify="left" if column == 0 else "right", overflow="fold")
    for number, line in enumerate(lines[1:]):
        if number and groups and groups[number] != groups[number - 1]:
            table.add_section()
        table.add_row(*(Text(line[column]) for column in part))
    return table


def short(source: str) -> str:
    """Return the last part of a source's name."""
    return source.removeprefix("demo:").rsplit("/", 1)[-1]


def with_error(estimate: Estimate, form: str) -> str:
    """Format a mean with its standard error, if that is known; the error never has the sign of `form`."""
    digits = form.strip("+")
    return format(estimate.mean, form) + ("" if estimate.stderr is None else f" ±{format(estimate.stderr, digits)}")
