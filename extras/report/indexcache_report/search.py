"""One self-contained HTML page about a finished search."""

from __future__ import annotations

from indexcache_report.frontier import environment, section, spelt
from indexcache_report.points import Point, estimated
from indexcache_report.search_figures import heat_map_figure, loss_figure
from indexcache_report.words import words_of
from indexcache_search.results import tables
from indexcache_search.results.schema import SearchResult
from indexcache_search.results.words import serving_flags
from sglang_indexcache import Pattern


def render(result: SearchResult, model: str = "MODEL") -> str:
    """Render the page of a search of `model`, a hub id: no file beside it, no network."""
    template = environment().get_template("search.html")
    held_out, search = result.held_out, result.pattern_file.search
    assert search is not None
    found = {str(row.pattern): row.retention for row in result.found}
    rest = "bytes" if search.bytes is not None else "time"

    def served(point: Point) -> str | None:
        if point.pattern not in found:
            return spelt(point) if result.pattern_file.selection is None else None
        kept = found[point.pattern]
        name = f"--indexcache-pattern pattern.yaml{'' if kept is None else f'@{kept}'}"
        return " ".join([name, *serving_flags(result.pattern_file.selection)])

    figures = {
        "heat_maps": [
            heat_map_figure(result.overlap, Pattern.parse(letters, result.pattern_file.selection), kept or f"in {rest}")
            for letters, kept in found.items()
            if result.overlap is not None
        ],
        "loss": loss_figure(result) if result.steps else None,
    }
    return template.render(
        metrics=result,
        file=result.pattern_file,
        words=words_of(result.pattern_file.selection is not None),
        figures=figures,
        columns=tables.columns(held_out),
        rows=[tables.cells(row, held_out) for row in tables.shown_rows(held_out)],
        frontier=section(estimated(held_out), served, model=model),
        speed=tables.speed_line(held_out),
    )
