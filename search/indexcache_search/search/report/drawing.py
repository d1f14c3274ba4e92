"""Drawing shared by all figures."""

from __future__ import annotations

import io

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, RED, GREY = "#2563a8", "#c8352b", "#7a7f87"


def svg(figure: Figure) -> Markup:
    """Return the figure as SVG text that a page may hold."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return Markup(text[text.index("<svg") :])  # noqa: S704 (matplotlib's own output; labels are escaped by it)


def plain(text: str) -> str:
    """`text` that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """Create a figure of so many inches, with one panel."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
