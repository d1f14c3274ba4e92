"""Drawing shared by all figures: SVG whose colours follow the page that holds it."""

from __future__ import annotations

import io
import re

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, RED, GREY, GOLD, GREEN = "#2563a8", "#c8352b", "#7a7f87", "#9a6700", "#1a7f37"
_BLACK = "#000000"
_NAMES = {BLUE: "blue", RED: "red", GREY: "grey", GOLD: "gold", GREEN: "green", _BLACK: "ink"}
_COLOURS = re.compile("|".join(_NAMES))
_IDS = re.compile(r' id="([^"]*)"')
_TEXT = {"svg.fonttype": "none"}  # text stays text: smaller, and readable by those who can't see the figure


def svg(figure: Figure, label: str, *, tight: bool = True, keep: str = "", salt: str = "") -> Markup:
    """Return the figure as SVG text that a page may hold.

    Colours become the page's CSS variables (`--blue`, ..., `--ink` for black), with those of `drawing` as fallbacks.

    Args:
        figure: what to draw.
        label: what it shows, for those who can't see it.
        tight: whether margins are cut off; coordinates of `transData` hold only without that.
        keep: ids that begin so are kept, and those that the figure refers to; others would clash on a page.
        salt: makes the ids of figures on one page differ; their label if empty.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**_TEXT, "svg.hashsalt": salt or label}):
        figure.savefig(
            buffer,
            format="svg",
            bbox_inches="tight" if tight else None,
            metadata={"Date": None, "Creator": None},
            transparent=True,
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = _COLOURS.sub(lambda found: f"var(--{_NAMES[found[0]]}, {found[0]})", text)
    text = _IDS.sub(
        lambda found: found[0] if (keep and found[1].startswith(keep)) or f"#{found[1]}" in text else "", text
    )
    head = f'<svg role="img" aria-label="{escape(label)}"'
    return Markup(text.replace("<svg", head, 1))  # noqa: S704 (matplotlib's own output; labels are escaped by it)


def plain(text: str) -> str:
    """`text` that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """Create a figure of so many inches, with one panel."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
