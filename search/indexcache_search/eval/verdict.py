"""Say where a pattern or server of a comparison is worse, and whether a gate may let it pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results import tables
from indexcache_search.results.schema import HeldOut, Row, SourceResult
from indexcache_search.results.variant import NAMED, PHASE


def findings(table: HeldOut) -> list[str]:
    """Say of each row where it is worse than the baseline, and how much worse it may be where that is not shown."""
    return [
        f"{tables.label(row)}: {'; '.join(_found(row, table.sources))}"
        for row in table.rows
        if row.kind in (NAMED, PHASE)
    ]


def _found(row: Row, sources: Sequence[str]) -> Iterator[str]:
    broken = [source for source in sources if not math.isfinite(row.by_source[source].increase.mean)]
    worse = [source for source in sources if source not in broken and _worse(row.by_source[source])]
    rises = {source: row.by_source[source].increase for source in sources if source not in {*broken, *worse}}
    unknown = [source for source, rise in rises.items() if not math.isfinite(rise.high)]
    known = {source: rise.high for source, rise in rises.items() if source not in unknown}
    if broken:
        yield f"the loss is NaN or infinite on {', '.join(broken)}"
    if worse:
        yield f"worse on {', '.join(worse)}"
    if unknown:
        yield f"not settled on {', '.join(unknown)}: too few sequences to tell"
    if known:
        most = max(known, key=lambda source: known[source])
        where = "elsewhere " if broken or worse or unknown else ""
        yield f"{where}not shown to be worse: the loss rises by at most {known[most]:.4f} ({most})"


def _worse(source: SourceResult) -> bool:
    falls = [change for change in (source.accuracy_change, source.generated_change) if change is not None]
    return source.increase.low > 0 or any(change.high < 0 for change in falls)


def beyond(rows: Sequence[Row], most: float) -> list[str]:
    """Return a line for each named pattern or server that is not shown to lose at most `most` on every source.

    To pass, the interval of each source's increase must end within `most`. Since all of them must, chance lets none
    pass more often than it would on one source alone, and nothing is corrected for their number.
    """
    named = [row for row in rows if row.kind == NAMED]
    lines = [f"{tables.label(row)}: {'; '.join(found)}" for row in named if (found := list(_beyond(row, most)))]
    return lines if named else ["nothing was compared"]


def _beyond(row: Row, most: float) -> Iterator[str]:
    rises = {source: measured.increase for source, measured in row.by_source.items()}
    broken = [source for source, rise in rises.items() if not math.isfinite(rise.mean)]
    worse = {source: rise for source, rise in rises.items() if source not in broken and rise.low > most}
    others = {source: rise for source, rise in rises.items() if source not in {*broken, *worse}}
    unsettled = {source: rise for source, rise in others.items() if not rise.high <= most}
    if broken:
        yield f"the loss is NaN or infinite on {', '.join(broken)}"
    if worse:
        yield f"worse on {_each(worse)}"
    if unsettled:
        yield f"not settled on {_each(unsettled)}; more sequences would decide"


def _each(rises: dict[str, Estimate]) -> str:
    return ", ".join(f"{source} ({_interval(rise)})" for source, rise in rises.items())


def _interval(rise: Estimate) -> str:
    if not math.isfinite(rise.margin):
        return f"{rise.mean:+.4f}, and too few sequences to say how far off that is"
    return f"{rise.mean:+.4f}, {rise.low:+.4f} to {rise.high:+.4f}"
