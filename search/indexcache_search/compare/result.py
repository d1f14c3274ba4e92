"""A comparison as numbers, as a table and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np
from rich.markup import escape
from rich.table import Table

from indexcache_search import metrics, objectives, tables
from indexcache_search.compare.held_out import HeldOut
from indexcache_search.compare.measure import Measured
from indexcache_search.line import BASELINE, BEST, MEAN, NAMED, PHASE
from indexcache_search.objectives import Estimate
from indexcache_search.report.figures import changes_figure

SCHEMA = "indexcache-eval/v1"
ERRORS = 2.0  # standard errors that make a change a finding


def collect(lines: Sequence[Measured], held_out: HeldOut, index_topk: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything measured: `held_out` as in metrics.json of a search, with `kl`, and changes paired by sequence.

    Args:
        lines: the baseline first.
        held_out: what was run.
        index_topk: of the model.
        about: what else a reader wants to know: model, engine, servers.
    """
    data = held_out.data
    table = metrics.held_out([line.row for line in lines], data, index_topk)
    for line, row in zip(lines, table["rows"], strict=False):
        base = lines[0]
        for number, name in enumerate(data.sources):
            source = row["by_source"][name]
            change = np.subtract(line.row.evaluation.correct, base.row.evaluation.correct)
            source["accuracy_change"] = _estimate(objectives.share(change, line.row.evaluation, data, number))
            if line.divergence is not None:
                source["kl"] = _estimate(objectives.loss(line.divergence, data, number))
            rows = [at for at in np.flatnonzero(data.source_of == number) if int(at) in held_out.answers]
            if rows:
                values = np.asarray([line.generated[int(at)] for at in rows])
                before = np.asarray([base.generated[int(at)] for at in rows])
                source["generated"] = _estimate(_mean(values))
                source["generated_change"] = _estimate(_mean(values - before))
        if line.divergence is not None:
            row["kl"] = _estimate(objectives.loss(line.divergence, data))
    return {"schema": SCHEMA, **about, "held_out": table, "findings": findings(table)}


def findings(table: Mapping[str, Any]) -> list[str]:
    """A line for each row: where it is worse than the baseline by more than two standard errors."""
    lines = []
    for row in table["rows"]:
        if row["kind"] not in (NAMED, PHASE):
            continue
        worse = [source for source in table["sources"] if _worse(row["by_source"][source])]
        verdict = f"worse on {', '.join(worse)}" if worse else "no worse on anything"
        lines.append(f"{tables.label(row)}: {verdict}, by more than {ERRORS:g} standard errors")
    return lines


def rises(found: Mapping[str, Any]) -> float:
    """The largest increase of any loss, less two standard errors; only patterns and servers that were named count.

    Infinite where one is not a number.
    """
    named = [row for row in found["held_out"]["rows"] if row["kind"] == NAMED]
    sources = [source["increase"] for row in named for source in row["by_source"].values()]
    lower = [one["mean"] - ERRORS * (one["stderr"] or 0.0) for one in sources]
    return max((value if math.isfinite(value) else math.inf for value in lower), default=math.inf)


def _worse(source: Mapping[str, Any]) -> bool:
    rises, falls = source["increase"], [source["accuracy_change"]]
    if "generated_change" in source:
        falls.append(source["generated_change"])
    return _beyond(rises["mean"], rises["stderr"]) or any(_beyond(-one["mean"], one["stderr"]) for one in falls)


def _beyond(rise: float, stderr: float | None) -> bool:
    return stderr is not None and rise > ERRORS * stderr and rise > 0


def _mean(values: Any) -> Estimate:
    error = None if len(values) < 2 else float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(float(np.mean(values)), error)


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"mean": estimate.mean, "stderr": estimate.stderr}


def task_table(result: Mapping[str, Any]) -> Table | None:
    """Tasks for a terminal: the share of answers given, and its change; `None` without tasks."""
    table = result["held_out"]
    tasks = [source for source in table["sources"] if "generated" in table["rows"][0]["by_source"][source]]
    if not tasks:
        return None
    shown = Table(title="Generated tasks: share of the answers given (change from the baseline)")
    shown.add_column("pattern")
    for task in tasks:
        shown.add_column(task.removesuffix("-style"), justify="right", no_wrap=True)
    for row in table["rows"]:
        if row["kind"] in (MEAN, BEST):
            continue  # a summary of several patterns
        cells = [escape(tables.label(row))]
        for task in tasks:
            value, change = row["by_source"][task]["generated"], row["by_source"][task]["generated_change"]
            error = "" if change["stderr"] is None else f" ±{change['stderr']:.3f}"
            cells.append(
                f"{value['mean']:.3f}" + ("" if row["kind"] == BASELINE else f" ({change['mean']:+.3f}{error})")
            )
        shown.add_row(*cells)
    return shown


def render(result: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A self-contained page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(result=result, columns=columns, rows=rows, figure=changes_figure(result["held_out"]))
