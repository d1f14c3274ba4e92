"""Rendering of offload.json and offload.html."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

import jinja2
from markupsafe import Markup

from indexcache_search.lab.offload.result import COLUMNS, OffloadResult, PlanTraffic, cells, heading, sentence
from indexcache_search.search.report.drawing import GREY, blank, plain, svg

FILES = ("offload.json", "offload.html")


def texts(result: OffloadResult) -> dict[str, str]:
    """Render the contents of `FILES`, by name."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    plans = [(plan, heading(plan), [cells(buffer) for buffer in plan.buffers]) for plan in result.plans]
    page = template.render(
        result=result, plans=plans, columns=COLUMNS, sentence=sentence(result), figure=misses_figure(result.plans)
    )
    return dict(zip(FILES, (json.dumps(result.as_json(), indent=1) + "\n", page), strict=True))


def misses_figure(plans: Sequence[PlanTraffic]) -> Markup:
    """Draw the tokens copied in a request's decode step over the size of the buffer: all, and the exposed ones."""
    figure, axes = blank(8, 3.6)
    for number, plan in enumerate(plan for plan in plans if plan.buffers):
        times = [buffer.times for buffer in plan.buffers]
        exposed = [plan.item * buffer.exposed.mean for buffer in plan.buffers]
        everything = [plan.item * (buffer.exposed.mean + buffer.hidden.mean) for buffer in plan.buffers]
        colour = f"C{number}"
        axes.plot(times, everything, color=colour, marker="o", markersize=4, linewidth=1.2, label=plain(plan.name))
        axes.plot(times, exposed, color=colour, marker="o", markersize=3, linewidth=1.0, linestyle="--")
    axes.plot([], [], color=GREY, linestyle="--", label="of these, exposed")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("buffer, in units of what a query selects")
    axes.set_ylabel("tokens a step, all layers")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)
