"""One self-contained HTML page about a finished search."""

from __future__ import annotations

from importlib.resources import files

import jinja2

from indexcache_search.results import tables
from indexcache_search.results.held_out import SearchResult
from indexcache_search.results.variant import NAMED
from indexcache_search.search.comparison import IN_TIME
from indexcache_search.search.report.figures import comparison_figure, heat_map_figure, loss_figure
from sglang_indexcache import Pattern


def render(result: SearchResult) -> str:
    """Render the page of a search: no script, no file beside it, no network."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    held_out, search = result.held_out, result.pattern_file.search
    assert search is not None
    chosen = {
        str(row.retention or "in time"): str(row.pattern)
        for row in held_out.rows
        if row.kind == NAMED and row.name in (search.strategy, f"{search.strategy}{IN_TIME}")
    }
    figures = {
        "comparison": comparison_figure(held_out),
        "heat_maps": [
            heat_map_figure(result.overlap, Pattern.parse(letters, result.pattern_file.selection), kept)
            for kept, letters in chosen.items()
            if result.overlap is not None
        ],
        "loss": loss_figure(result) if result.steps else None,
    }
    return template.render(
        metrics=result,
        file=result.pattern_file,
        figures=figures,
        columns=tables.columns(held_out),
        rows=[tables.cells(row, held_out) for row in tables.shown_rows(held_out)],
        chosen=chosen,
        speed=tables.speed_line(held_out),
    )
