"""A comparison as numbers and as tables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from indexcache_search.eval.extra import comparisons
from indexcache_search.eval.held_out import ComparisonSet
from indexcache_search.eval.measure import Compared
from indexcache_search.eval.table import tabulated
from indexcache_search.eval.verdict import findings
from indexcache_search.evaluation import estimates
from indexcache_search.results import tables
from indexcache_search.results.pages import pages
from indexcache_search.results.schema import ComparisonResult, Row, SpeedRow
from indexcache_search.results.variant import BASELINE, BEST, MEAN
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.workdir.outputs import WORK
from sglang_indexcache import ModelLayers

SCHEMA = "indexcache-eval/v1"


def collect(
    lines: Sequence[Compared],
    held_out: ComparisonSet,
    model: ModelLayers,
    *,
    engine: str,
    prices: Prices | None = None,
    speed: Sequence[SpeedRow] = (),
) -> ComparisonResult:
    """Collect all measurements: `held_out` as in metrics.json of a search, with `kl` and changes paired by sequence.

    Args:
        lines: the baseline first.
        held_out: the sequences.
        model: what was compared, or what servers serve.
        engine: name of the engine, or of the servers.
        prices: latencies of layers, where patterns have such.
        speed: rows of speed, where it was requested.
    """
    table = tabulated(lines, held_out.data, model.first_sparse_position, prices)
    rows = [_with_changes(row, line, lines[0], held_out) for line, row in zip(lines, table.rows, strict=False)]
    table = table.model_copy(update={"rows": [*rows, *table.rows[len(rows) :]]})
    return ComparisonResult(
        schema=SCHEMA,
        model=model.name,
        engine=engine,
        seq_len=held_out.data.seq_len,
        held_out=table,
        findings=findings(table),
        **({"speed": list(speed)} if speed else {}),
    )


def _with_changes(row: Row, line: Compared, base: Compared, held_out: ComparisonSet) -> Row:
    """Return `row` with changes from the baseline, `kl` and the tasks' answers."""
    data, by_source = held_out.data, {}
    for number, name in enumerate(data.sources):
        change = np.subtract(line.evaluation.correct, base.evaluation.correct)
        more = {"accuracy_change": estimates.share(change, line.evaluation, data, number)}
        if line.divergence is not None:
            more["kl"] = estimates.loss(line.divergence, data, number)
        answered = [int(at) for at in np.flatnonzero(data.source_of == number) if int(at) in held_out.answers]
        if answered:
            values = np.asarray([line.generated[at] for at in answered])
            before = np.asarray([base.generated[at] for at in answered])
            copies = data.copy_of[answered]
            more["generated"] = estimates.over(values, copies)
            more["generated_change"] = estimates.over(values - before, copies)
        by_source[name] = row.by_source[name].model_copy(update=more)
    kl = {} if line.divergence is None else {"kl": estimates.loss(line.divergence, data)}
    extra = {"extra": dict(line.extra)} if line.extra else {}
    return row.model_copy(update={"by_source": by_source, **kl, **extra})


def task_tables(result: ComparisonResult, width: int) -> list[Table]:
    """Make the tables of tasks for a terminal of `width` columns: the share of answers given, and its change."""
    table = result.held_out
    tasks = [source for source in table.sources if table.rows[0].by_source[source].generated is not None]
    lines = [["pattern", *(task.removesuffix("-style") for task in tasks)]]
    for row in table.rows:
        if row.kind in (MEAN, BEST):
            continue  # a summary of several patterns
        cells = [tables.label(row)]
        for task in tasks:
            value, change = row.by_source[task].generated, row.by_source[task].generated_change
            assert value is not None and change is not None
            cells.append(
                f"{value.mean:.3f}" + ("" if row.kind == BASELINE else f" ({tables.with_error(change, '+.3f')})")
            )
        lines.append(cells)
    return tables.fitted("Generated tasks: share of the answers given (change from the baseline)", lines, 1, width)


FILES = ("eval.json", "eval.html")
NO_FIGURES: Mapping[str, str] = {}


def ever() -> str:
    """Return a regular expression of all names that indexcache-eval writes, whatever it is asked for."""
    extra = (name for comparison in comparisons().values() for name in comparison.files)
    return "|".join(map(re.escape, (*FILES, *extra, *WORK)))


def texts(result: ComparisonResult, figures: Mapping[str, str] = NO_FIGURES) -> dict[str, str]:
    """Render the contents of `FILES`, by name, see `Pages`; `figures` are SVG texts of a study, by their titles."""
    data, page = FILES
    made, content = pages(), json.dumps(result.as_json(), indent=1) + "\n"
    return {data: content, **({} if made is None else {page: made.comparison(result, figures)})}
