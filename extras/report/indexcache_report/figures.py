"""Loss beside speed, as SVG and as the positions to which a script moves its points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from indexcache_report.advice import ALLOWANCE, ALLOWANCES
from indexcache_report.drawing import BLUE, GREEN, GREY, plain, svg
from indexcache_report.points import Frontier, Point
from indexcache_report.words import words_of
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results.variant import BASELINE, NAMED

LINEAR = 0.01  # nats up to which the axis of losses is linear; above it is logarithmic
TICKS = (-1.0, -0.1, -0.01, 0.0, 0.01, 0.1, 1.0, 10.0, 100.0)
INCH = 72  # units of an SVG
LARGE, SMALL = (400, 330), (230, 170)


@dataclass(frozen=True)
class Chart:
    """A figure of the longest context, and where things are in it, in units of the SVG.

    Attributes:
        svg: the figure; ids begin with `name`, those of points with their number behind it.
        name: of the figure, unique on the page.
        x: by context, then by point: the low end of the speed, the speed, the high end; `None` if it is unknown.
        limits: height of the line of each allowance, at most the figure's.
        line: by context, the path through the best points; empty if it is not drawn.
    """

    svg: Markup
    name: str
    x: list[list[tuple[float, float, float] | None]]
    limits: list[float]
    line: list[str]

    def positions(self) -> dict[str, Any]:
        """Return what a script needs."""
        return {"name": self.name, "x": self.x, "limits": self.limits, "line": self.line}


def chart(frontier: Frontier, source: str | None = None) -> Chart:
    """Draw the loss over the speed: on the hardest source, or smaller on one source, on the same axes."""
    panel = _Panel(frontier, source)
    panel.draw()
    return panel.chart()


class _Panel:
    """A figure while it is drawn."""

    def __init__(self, frontier: Frontier, source: str | None) -> None:
        self.frontier, self.source = frontier, source
        self.contexts: Sequence[int | None] = frontier.contexts or (None,)
        self.shown = frontier.shown(self.contexts[-1])
        self.name = "frontier" if source is None else f"source-{frontier.sources.index(source)}"
        self.font = 12 if source is None else 10
        self.width, self.height = LARGE if source is None else SMALL
        self.figure = Figure(figsize=(self.width / INCH, self.height / INCH), dpi=INCH)
        bottom = 44 if source is None else 22
        left = 60 if source is None else 42
        box = (left / self.width, bottom / self.height, 1 - (left + 8) / self.width, 1 - (bottom + 8) / self.height)
        self.axes = self.figure.add_axes(box)
        self.axes.spines[:].set_visible(False)

    def loss(self, point: Point) -> Estimate:
        return point.worst if self.source is None else point.increases[self.source]

    def place(self, point: Point, context: int | None) -> tuple[float, float, float] | None:
        """Return the low end, the value and the high end on the axis of speeds."""
        if point not in self.shown or self.frontier.speed(point, context) is None:
            return None
        if context is None:
            count = float(point.full_layers or 0)
            return count, count, count
        speed = point.speeds[context]
        return speed.low, speed.value, speed.high

    def speed(self, point: Point, context: int | None) -> float:
        """Return the value on the axis of speeds, of a point that is shown."""
        place = self.place(point, context)
        assert place is not None
        return place[1]

    def across(self, value: float) -> float:
        return round(float(self.axes.transData.transform((value, 0.0))[0]), 1)

    def up(self, value: float) -> float:
        at = (self.axes.get_xlim()[0], value)
        return round(self.height - float(self.axes.transData.transform(at)[1]), 1)

    def draw(self) -> None:
        self._set_limits()
        self._set_ticks()
        low = self.axes.get_ylim()[0]
        self.axes.axhspan(low, ALLOWANCE, color=GREEN, alpha=0.13, linewidth=0, gid=f"{self.name}-band")
        self.axes.axhline(ALLOWANCE, color=GREEN, linewidth=1.2, linestyle=(0, (4, 3)), gid=f"{self.name}-limit")
        if self.source is None:
            best = self.frontier.best(self.contexts[-1])
            speeds = [self.speed(point, self.contexts[-1]) for point in best]
            losses = [self.loss(point).mean for point in best]
            self.axes.plot(speeds, losses, color=GREY, linewidth=1.2, alpha=0.6, gid=f"{self.name}-line")
        for number, point in enumerate(self.frontier.points):
            self._draw_point(f"{self.name}-{number}", point)
        if self.source is None:
            self._draw_names()

    def _set_limits(self) -> None:
        """Set limits that hold at every context and source."""
        places = [place for item in self.contexts for point in self.shown if (place := self.place(point, item))]
        first, last = min(place[0] for place in places), max(place[2] for place in places)
        room = max(last - first, 0.1) * 0.05
        ends = (first - room, last + room)
        self.axes.set_xlim(ends if self.frontier.contexts else ends[::-1])
        means = [increase.mean for point in self.shown for increase in point.increases.values()]
        self.axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.6)
        self.axes.set_ylim(min(-0.005, 1.5 * min(means)), max(0.15, 1.9 * max(means)))

    def _set_ticks(self) -> None:
        axes, timed = self.axes, bool(self.frontier.contexts)
        low, high = axes.get_ylim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
        axes.minorticks_off()
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=not timed, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x" if timed else f"{value:g}")
        axes.tick_params(labelsize=self.font, length=0)
        axes.grid(color=GREY, alpha=0.3, linewidth=0.6)
        if self.source is None:
            what = f"speed of prompts, {self.frontier.speeds}" if timed else words_of(self.frontier.dense).full
            axes.set_xlabel(f"{what} (faster to the right)", fontsize=self.font)
            axes.set_ylabel("loss added on the hardest source", fontsize=self.font, labelpad=3)

    def _draw_point(self, gid: str, point: Point) -> None:
        """Draw the intervals of a point's loss and speed, and its mark."""
        place = self.place(point, self.contexts[-1])
        if place is None:
            return
        low, value, high = place
        loss, colour = self.loss(point), BLUE if point.kind == NAMED else GREY
        if point.kind != BASELINE and loss.margin > 0:
            bottom, top = self.axes.get_ylim()  # an error that is unknown has a bar over all of the figure
            ends = [max(loss.low, bottom), min(loss.high, top)]
            self.axes.plot([value, value], ends, color=colour, linewidth=1.2, alpha=0.7, gid=f"{gid}-loss")
        if high > low and self.source is None:
            self.axes.plot([low, high], [loss.mean] * 2, color=colour, linewidth=1.2, alpha=0.5, gid=f"{gid}-speed")
        mark, size = "o" if point.kind in (NAMED, BASELINE) else "^", 8 if self.source is None else 5
        style: Any = {"color": colour, "markersize": size, "markeredgewidth": 0, "clip_on": False}
        self.axes.plot([value], [loss.mean], mark, gid=f"{gid}-mark", **style)

    def _draw_names(self) -> None:
        """Write names beside points, the best first, as long as there is room."""
        context = self.contexts[-1]
        best = self.frontier.best(context)
        order = [*best, *(point for point in self.shown if point.kind == NAMED), *self.shown]
        taken = [self._around(point) for point in self.shown]
        for number in dict.fromkeys(self.frontier.points.index(point) for point in order):
            point = self.frontier.points[number]
            x, y = self._centre(point)
            width = 0.56 * self.font * len(point.names[0])
            for right, above in ((True, True), (False, True), (True, False), (False, False)):
                left, top = x + 6 if right else x - width - 6, y - 15 if above else y + 4
                box = (left, top - 1, left + width, top + self.font + 1)
                if left < 58 or box[2] > self.width or any(_meet(box, other) for other in taken):
                    continue
                taken.append(box)
                self._write(f"{self.name}-{number}-name", point, right, above)
                break

    def _centre(self, point: Point) -> tuple[float, float]:
        """Return where a point's mark is."""
        return self.across(self.speed(point, self.contexts[-1])), self.up(self.loss(point).mean)

    def _around(self, point: Point) -> tuple[float, float, float, float]:
        """Return the box of a point's mark: left, top, right, bottom."""
        x, y = self._centre(point)
        return x - 5, y - 5, x + 5, y + 5

    def _write(self, gid: str, point: Point, right: bool, above: bool) -> None:
        """Write a point's name beside it."""
        self.axes.annotate(
            plain(point.names[0]),
            (self.speed(point, self.contexts[-1]), self.loss(point).mean),
            (6 if right else -6, 9 if above else -10),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=self.font,
            annotation_clip=False,
            gid=gid,
        )

    def chart(self) -> Chart:
        places = [[self.place(point, context) for point in self.frontier.points] for context in self.contexts]
        top = self.axes.get_ylim()[1]
        lines = [self._line(context) for context in self.contexts] if self.source is None else []
        return Chart(
            svg=svg(self.figure, self._label(), tight=False, keep=f"{self.name}-", salt=self.name),
            name=self.name,
            x=[
                [None if place is None else (self.across(place[0]), self.across(place[1]), self.across(place[2]))
                 for place in row] for row in places
            ],
            limits=[self.up(min(allowance, top)) for allowance in ALLOWANCES],
            line=lines,
        )  # fmt: skip

    def _line(self, context: int | None) -> str:
        corners = [
            f"{self.across(self.speed(point, context))} {self.up(self.loss(point).mean)}"
            for point in self.frontier.best(context)
        ]
        return "M " + " L ".join(corners)

    def _label(self) -> str:
        what = "the hardest source" if self.source is None else self.source
        values = "; ".join(f"{point.name}: {self.loss(point).mean:+.3f}" for point in self.shown)
        return f"Loss added on {what}, in nats a token, over speed. {values}"


def _meet(box: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
