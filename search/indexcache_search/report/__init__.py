"""One self-contained HTML page about a finished search."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import jinja2

from indexcache_search import tables
from indexcache_search.line import NAMED
from indexcache_search.report.figures import comparison_figure, heat_map_figure, loss_figure
from sglang_indexcache import Pattern


def render(metrics: Mapping[str, Any]) -> str:
    """The page for `metrics` (of `indexcache_search.metrics.collect`): no script, no file beside it, no network."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    held_out, pattern_file = metrics["held_out"], metrics["pattern_file"]
    chosen = {
        row["retention"]: row["pattern"]
        for row in held_out["rows"]
        if row["kind"] == NAMED and row["name"] == pattern_file["search"]["strategy"]
    }
    figures = {
        "comparison": comparison_figure(held_out),
        "heat_maps": [
            heat_map_figure(metrics["overlap"], Pattern(roles), kept)
            for kept, roles in chosen.items()
            if metrics["overlap"] is not None
        ],
        "loss": loss_figure(metrics) if metrics["steps"] else None,
    }
    return template.render(
        metrics=metrics,
        file=pattern_file,
        figures=figures,
        columns=tables.columns(held_out),
        rows=[tables.cells(row, held_out) for row in tables.shown_rows(held_out)],
        chosen=chosen,
    )
