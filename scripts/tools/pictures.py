"""Draw the pictures of README and docs/explanation.md: docs/images/*.svg.

    python -m scripts.tools.pictures

The first shows the demo's patterns as they stand in the package, with the losses of docs/evidence/demo.md. The others
explain, with made-up scores. They are written as text, so that the same figures give the same bytes on every machine.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from indexcache_search import demo
from sglang_indexcache import Pattern, PatternFile

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"
TABLE = ROOT / "docs" / "evidence" / "demo.md"
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px } .mono { font-family: ui-monospace, monospace }
.strong { fill: #0b5fb0 } .weak { fill: #d5dde5 } .other { fill: #b3541e } .line { stroke: #57606a; fill: none }
.on { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .strong { fill: #58a6ff } .weak { fill: #38424d } .other { fill: #f0883e }
  .line { stroke: #9ea7b3 } .on { fill: #0d1117 }
}
</style>"""


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    inner = f"<title>{title}</title>" if title else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}">{inner}</rect>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" class="line" marker-end="url(#arrow)"/>'


def picture(width: int, height: int, title: str, *parts: str) -> str:
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M1 1 L7 4 L1 7" class="line"/></marker></defs>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
    return "\n".join([head, f"<title>{title}</title>", STYLE, arrow, *parts, "</svg>"]) + "\n"


def increases() -> dict[tuple[str, str], float]:
    """Read the increases of the loss from the table of the evidence, by pattern and retention."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {(row[0], row[1]): float(row[4].split()[0]) for row in rows if len(row) > 9 and row[4].startswith("+")}


def patterns() -> str:
    """Draw a quarter of the demo's layers as F, searched and uniform, with their losses.

    Of 1/2 and 1/8 one search says nothing that holds on average: see the evidence.
    """
    lost, parts = increases(), []
    top, cell, bar = 44, 17, 205
    parts.append(text(120, 20, "layer 0"))
    parts.append(text(120 + 16 * cell, 20, "15", anchor="end"))
    parts.append(text(430, 20, "loss above all F, nats a token"))
    found, uniform = PatternFile.load(demo.PATTERNS[0]).pattern_at(Fraction(1, 4)), Pattern.uniform(16, 4)
    for name, key, kind, pattern in (
        ("searched", "lazy", "strong", found),
        ("uniform", "uniform (paper's phase)", "other", uniform),
    ):
        increase = lost[key, "1/4"]
        parts.append(text(112, top + 13, f"1/4 {name}", anchor="end"))
        for layer, role in enumerate(pattern.roles):
            x = 120 + layer * cell
            parts.append(rect(x, top, cell - 2, cell - 1, kind if role == "F" else "weak", f"layer {layer}: {role}"))
            parts.append(
                text(x + (cell - 2) / 2, top + 12, role, "small mono on" if role == "F" else "small mono", "middle")
            )
        parts.append(rect(430, top + 2, max(increase / 0.45 * bar, 1), cell - 5, kind))
        parts.append(text(436 + increase / 0.45 * bar, top + 13, f"+{increase:.3f}"))
        top += 22
    title = "Which layers of the demo stay F at a quarter, searched and uniform, and what that loses"
    return picture(720, top + 10, title, *parts)


def dsa() -> str:
    """One query: the indexer scores all keys, attention reads the best."""
    scores = [9, 30, 12, 52, 8, 15, 41, 10, 14, 60, 11, 18, 9, 36, 13, 7, 47, 16, 12, 22, 34, 10, 40, 55]
    best = sorted(range(len(scores)), key=lambda item: -scores[item])[:8]
    parts = [text(20, 24, "the lightning indexer scores every earlier key: the cost that grows with the square")]
    for key, score in enumerate(scores):
        kind = "strong" if key in best else "weak"
        parts += [rect(20 + key * 26, 108 - score, 20, score, kind), rect(20 + key * 26, 150, 20, 20, kind)]
        if key in best:
            parts.append(line(30 + key * 26, 112, 30 + key * 26, 146))
    parts += [text(20, 196, "attention reads the top-k keys alone (here 8 of 24; in the models 2,048)")]
    parts += [rect(652, 150, 20, 20, "other"), text(662, 196, "query", anchor="middle")]
    return picture(720, 210, "DSA: an indexer scores all keys, attention reads the best", *parts)


def sharing() -> str:
    """Draw a stack of layers: F runs its indexer, S takes the selection of the F before it."""
    parts, width = [], 82
    for layer, role in enumerate("FSSSFSSS"):
        x, shared = 20 + layer * (width + 4), role == "S"
        parts.append(rect(x, 60, width, 50, "weak"))
        parts.append(text(x + width / 2, 90, "attention", anchor="middle"))
        parts.append(text(x + width / 2, 160, f"layer {layer}: {role}", "small mono", "middle"))
        if not shared:
            parts += [rect(x, 118, width, 24, "strong"), text(x + width / 2, 135, "indexer", "on", "middle")]
            parts.append(f'<path d="M{x + width / 2} 58 V36 H{x + 3 * (width + 4) + width / 2}" class="line"/>')
            parts.append(text(x + width / 2 + 6, 28, "one selection, used four times", "small"))
        else:
            parts.append(line(x + width / 2, 36, x + width / 2, 58))
            parts.append(text(x + width / 2, 135, "no indexer", "small", "middle"))
    return picture(720, 176, "IndexCache: S layers reuse the selection of the nearest F layer before them", *parts)


SELECTED = ((1, 4, 6), (0, 4, 7), (2, 5, 6))  # of the blocks of four in the picture


def blocks() -> str:
    """Draw queries against keys: four neighbours share what their leader selected."""
    parts, cell = (
        [text(20, 20, "queries select one by one"), text(380, 20, "blocks of 4: one selection for a block")],
        14,
    )
    for left, size in ((20, 1), (380, 4)):
        for query in range(12):
            leader = query // size * size
            chosen = set(SELECTED[query // 4])
            if size == 1:  # nearly what its neighbours select
                chosen = chosen - {min(chosen)} | {(query * 3) % 8} if query % 4 in (1, 3) else chosen
            for key in range(8 + query + 1):
                own = size > 1 and 8 + leader <= key
                kind = "other" if own else "strong" if key in chosen and key < 8 + leader else "weak"
                parts.append(rect(left + key * (cell + 1), 32 + query * (cell + 1), cell, cell, kind))
    parts += [text(20, 230, "a row is a query, a column a key; blue: selected", "small")]
    parts += [text(380, 230, "orange: keys of the block itself, always seen", "small")]
    return picture(720, 240, "Blocks of queries: neighbours share the selection of their mean", *parts)


def delta() -> str:
    """Decode steps of a dense model: D layers read all pages, S layers the selected ones."""
    parts = [text(110, 20, "pages of the cache, oldest to newest; blue: what a decode step reads")]
    chosen: set[int] = set()
    for layer, role in enumerate("DSSDSS"):
        if role == "D":
            chosen = {(layer * 3 + step * step) % 17 for step in (2, 3, 5)} | {0, 18, 19}
        parts.append(text(100, 46 + layer * 26, f"layer {layer}: {role}", "mono", "end"))
        for page in range(20):
            kind = "strong" if role == "D" or page in chosen else "weak"
            parts.append(rect(110 + page * 28, 32 + layer * 26, 24, 20, kind))
    parts.append(
        text(110, 206, "a D layer attends to everything and selects; the S layers behind it read that selection")
    )
    return picture(720, 218, "DELTA: dense layers select pages of the cache, the layers behind them reuse them", *parts)


PICTURES = {"patterns": patterns, "dsa": dsa, "sharing": sharing, "blocks": blocks, "delta": delta}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
