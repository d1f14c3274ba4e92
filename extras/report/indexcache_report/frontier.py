"""The section of a page that says which pattern to take, and shows why."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable

import jinja2
from markupsafe import Markup

from indexcache_report.advice import ALLOWANCE, ALLOWANCES, choose, highest, less_likely, lowest
from indexcache_report.figures import Chart, chart
from indexcache_report.points import Frontier, Point
from indexcache_report.words import words_of
from indexcache_search.results import tables
from indexcache_search.results.variant import BASELINE, PHASE
from indexcache_search.results.words import counted
from sglang_indexcache.pattern import DENSE

SHORT = 12  # patterns that are listed before the others are folded away


def environment() -> jinja2.Environment:
    """Return the environment of all pages: text is escaped, names that are missing are errors."""
    found = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.PackageLoader("indexcache_report"),
    )
    found.globals |= {
        "PHASE": PHASE,
        "BASELINE": BASELINE,
        "highest": highest,
        "lowest": lowest,
        "less_likely": less_likely,
        "infinity": math.inf,
    }
    found.filters |= {"tokens": tables.tokens, "short": tables.short, "signed": signed, "counted": counted}
    return found


def section(
    frontier: Frontier | None, served: Callable[[Point], str | None], noun: str = "patterns", model: str = "MODEL"
) -> Markup:
    """Render the section; nothing where there are no points.

    Args:
        frontier: the points.
        served: how a server is told to run a point's pattern; `None` if there is no short way to say that.
        noun: what the points are.
        model: what a server is told to load.
    """
    if frontier is None:
        return Markup("")
    contexts = frontier.contexts or (None,)
    pages = environment()
    chosen = [[choose(frontier, context, allowance) for context in contexts] for allowance in ALLOWANCES]
    template, spoken = pages.get_template("advice.html"), words_of(frontier.dense)
    numbers = {id(point): number for number, point in enumerate(frontier.points)}
    given = {"frontier": frontier, "served": served, "noun": noun, "words": spoken, "model": shlex.quote(model)}
    advice = [[Markup(template.render(advice=item, **given)) for item in row] for row in chosen]  # noqa: S704
    picks = [[None if item.point is None else numbers[id(item.point)] for item in row] for row in chosen]
    main = chart(frontier)
    by_source = {source: chart(frontier, source) for source in frontier.sources if len(frontier.sources) > 1}
    start = ALLOWANCES.index(ALLOWANCE), len(contexts) - 1
    pick = picks[start[0]][start[1]]
    data = {
        "contexts": [None if context is None else f"{tables.tokens(context)} tokens" for context in contexts],
        "advice": advice,
        "picks": picks,
        "charts": [item.positions() for item in (main, *by_source.values())],
        "speeds": [[_speed(frontier, point, context) for point in frontier.points] for context in contexts],
        "names": [_spoken(frontier, point) for point in frontier.points],
        "within": [[point.finite and point.worst.mean <= item for point in frontier.points] for item in ALLOWANCES],
    }
    order = sorted(range(len(frontier.points)), key=lambda at: _rank(frontier, frontier.points[at]))
    folded = [at for at in order if frontier.points[at].kind == PHASE and len(order) > SHORT]
    return Markup(  # noqa: S704 (the template escapes)
        pages.get_template("frontier.html").render(
            frontier=frontier,
            noun=noun,
            words=spoken,
            kinds={point.kind for point in frontier.points},
            pick=pick,
            data=data,
            start=start,
            advice=advice[start[0]][start[1]],
            allowances=ALLOWANCES,
            allowance=ALLOWANCE,
            main=_stressed(main, pick),
            by_source={source: _stressed(item, pick) for source, item in by_source.items()},
            listed=[at for at in order if at not in folded],
            folded=folded,
        )
    )


def spelt(point: Point) -> str | None:
    """Return how a server is told to run a pattern: as it was given, else by letters that say all of it."""
    if point.served is not None or point.pattern is None or DENSE in point.pattern:
        return point.served
    return f"--indexcache-pattern {point.pattern}"


def signed(nats: float) -> str:
    """Format a loss."""
    return f"{nats:+.3f}"


def _stressed(item: Chart, pick: int | None) -> Markup:
    """Mark the point to take."""
    gid = f'id="{item.name}-{pick}-mark"'
    return Markup(str(item.svg).replace(gid, f'{gid} class="pick"'))  # noqa: S704 (escaped by matplotlib)


def _speed(frontier: Frontier, point: Point, context: int | None) -> str:
    """Return a point's speed in words."""
    if context is None:
        return "" if point.full_layers is None else f"{point.full_layers} {words_of(frontier.dense).short}"
    if context not in point.speeds:
        return "no time known"
    speed = point.speeds[context]
    time = "" if speed.ms is None else f", {speed.ms:.0f} ms"
    return f"{speed.value:.2f}x{time}"


def _spoken(frontier: Frontier, point: Point) -> str:
    """Describe a point in one line, for those who can't see it."""
    if not point.finite:
        return f"{point.name}: its loss is NaN or infinite"
    return f"{point.name}: {signed(point.worst.mean)} nats a token on {tables.short(point.hardest)}"


def _rank(frontier: Frontier, point: Point) -> tuple[float, float]:
    speed = frontier.speed(point, max(frontier.contexts, default=None))
    return (float("inf") if speed is None else -speed, point.worst.mean)
