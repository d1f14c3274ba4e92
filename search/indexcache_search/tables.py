"""The held-out comparison as a table for terminals and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from indexcache_search.estimates import Estimate
from indexcache_search.key_plan import STAGES
from indexcache_search.line import BASELINE, PHASE
from indexcache_search.results import HeldOut, Row
from sglang_indexcache.pattern import FULL


def of_keys(held_out: HeldOut) -> bool:
    """Whether plans for keys are compared, rather than patterns alone."""
    return any(row.skipped is not None for row in held_out.rows)


def shown_rows(held_out: HeldOut) -> list[Row]:
    """Rows for people: single phases other than the paper's are summed up by their mean and best."""
    shown = [row for row in held_out.rows if not _is_other_phase(row)]
    order = {retention: index for index, retention in enumerate(dict.fromkeys(row.retention for row in shown))}
    return sorted(shown, key=lambda row: (order[row.retention], row.increase.mean))


def _is_other_phase(row: Row) -> bool:
    return bool(row.kind == PHASE and row.phase != 0)


def columns(held_out: HeldOut) -> list[str]:
    """Column titles; sources with a loss mask show accuracy, which says more of answers, others the loss's increase."""
    if of_keys(held_out):
        return [
            "plan",
            *(f"skips {stage}" for stage in STAGES),
            "loss",
            "increase",
            "KL",
            *map(_short, held_out.sources),
        ]
    letter = next((row.pattern[0] for row in held_out.rows if row.pattern), FULL)
    return ["pattern", "kept", letter, "loss", "increase", *(_short(source) for source in held_out.sources)]


def cells(row: Row, held_out: HeldOut) -> list[str]:
    """One row's texts, in the order of `columns`."""
    name = "uniform (paper's phase)" if row.kind == PHASE else str(row.name)
    full = "" if row.full_layers is None else str(row.full_layers)
    kept = [row.retention or "", full]
    if row.skipped is not None:
        kept = [_with_error(row.skipped[stage], ".3f") if stage in row.skipped else "" for stage in STAGES]
    values = [name, *kept, f"{row.loss.mean:.4f}"]
    values.append("" if row.kind == BASELINE else _with_error(row.increase, "+.4f"))
    if row.skipped is not None:
        values.append("" if row.kind == BASELINE or row.kl is None else _with_error(row.kl, ".4f"))
    for source in held_out.sources:
        measured = row.by_source[source]
        if source in held_out.answer_sources:
            values.append(_with_error(measured.accuracy, ".3f"))
        elif row.kind == BASELINE:
            values.append(f"{measured.loss.mean:.4f}")
        else:
            values.append(_with_error(measured.increase, "+.4f"))
    return values


def label(row: Row) -> str:
    """A row's name, with what it keeps unless that is everything."""
    return f"{row.name} {row.retention}" if row.retention not in (None, "1") else str(row.name)


def terminal_table(held_out: HeldOut) -> Table:
    """The comparison for a terminal."""
    table = Table(title="Held-out comparison: loss, its increase over the baseline; sources with a loss mask: accuracy")
    for index, title in enumerate(columns(held_out)):
        table.add_column(Text(title), justify="left" if index == 0 else "right", no_wrap=True)
    previous = None
    for row in shown_rows(held_out):
        if previous not in (None, row.retention):
            table.add_section()
        table.add_row(*map(Text, cells(row, held_out)))  # plain text: names may look like markup
        previous = row.retention
    return table


def _short(source: str) -> str:
    return source.removeprefix("demo:").rsplit("/", 1)[-1]


def _with_error(estimate: Estimate, form: str) -> str:
    digits = form.strip("+")
    return format(estimate.mean, form) + ("" if estimate.stderr is None else f" ±{format(estimate.stderr, digits)}")


def retentions(held_out: HeldOut) -> Sequence[str]:
    """Retentions compared, the baseline's left out."""
    rows = [row for row in held_out.rows if row.kind != BASELINE]
    return list(dict.fromkeys(row.retention for row in rows if row.retention is not None))
