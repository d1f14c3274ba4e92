"""One self-contained HTML page about a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup
from matplotlib.figure import Figure

from indexcache_report.drawing import BLUE, GREY, plain, svg
from indexcache_report.frontier import environment, section, spelt
from indexcache_report.points import estimated, timed
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results import speed_table, tables
from indexcache_search.results.schema import ComparisonResult, HeldOut, SourceResult
from indexcache_search.results.variant import BASELINE


def render(result: ComparisonResult, figures: Mapping[str, str] | None = None) -> str:
    """Render the page; `figures` are SVG texts of a study, by their titles."""
    held_out = result.held_out
    rows = [tables.cells(row, held_out) for row in tables.shown_rows(held_out)]
    measured = [row for row in result.speed if row.source == "measured"]
    noun = "servers" if held_out.rows[0].pattern is None else "patterns"
    return (
        environment()
        .get_template("comparison.html")
        .render(
            result=result,
            noun=noun,
            columns=tables.columns(held_out),
            rows=rows,
            figure=changes_figure(held_out),
            figures=figures or {},
            frontier=section(timed(held_out, measured) or estimated(held_out), spelt, noun),
            prices=tables.speed_line(held_out),
            speed_title=speed_table.title(result.speed) if result.speed else "",
            speed=speed_table.lines(result.speed, held_out) if result.speed else [],
        )
    )


def changes_figure(held_out: HeldOut) -> Markup:
    """Draw a panel for each source: how each row differs from the baseline, with its interval of 95 %.

    Tasks show the share of answers given, sources with a loss mask accuracy, others the loss.
    """
    rows = [
        row
        for row in held_out.rows
        if row.kind != BASELINE and all(item.accuracy_change is not None for item in row.by_source.values())
    ]
    sources = held_out.sources
    figure = Figure(figsize=(2.3 * len(sources) + 1.5, 0.32 * len(rows) + 1.3))
    panels = figure.subplots(1, len(sources), sharey=True, squeeze=False)[0]
    labels = [plain(tables.label(row)) for row in rows]
    for panel, source in zip(panels, sources, strict=True):
        measured = [row.by_source[source] for row in rows]
        what = _shown(measured, source in held_out.answer_sources)
        changes: list[Estimate] = [getattr(item, what) for item in measured]
        panel.errorbar(
            [change.mean for change in changes],
            range(len(rows)),
            xerr=[change.margin if math.isfinite(change.margin) else 0.0 for change in changes],
            fmt="o",
            markersize=4,
            color=BLUE,
            elinewidth=1.1,
        )
        panel.axvline(0, color=GREY, linewidth=0.8)
        panel.set_title(plain(source.rsplit("/", 1)[-1].removeprefix("demo:")), fontsize=9)
        panel.set_xlabel({"increase": "loss", "accuracy_change": "accuracy"}.get(what, "answers given"), fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), labels, fontsize=8)
    panels[0].invert_yaxis()
    return svg(figure, "Change from the baseline on each source; the table below has the same figures")


def _shown(measured: Sequence[SourceResult], has_answers: bool) -> str:
    """Change that a panel shows."""
    if measured and all(item.generated_change is not None for item in measured):
        return "generated_change"
    return "accuracy_change" if has_answers else "increase"
