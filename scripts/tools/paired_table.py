"""Patterns of one indexcache-eval beside each other, paired by sequence: the table of docs/evidence/dense-models.md.

By budget and pattern: increase of the loss, KL to the model that shares nothing, over all sequences, those of the last
source and the others; and how much more KL than the first pattern has. ± is the standard error over sequences.

    python -m scripts.tools.paired_table build/smollm2/eval searched=DSSD... shift=DDDS... --last recall
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexcache_dense.selection import selection_in
from scripts.tools.recorded import recorded
from sglang_indexcache import Pattern

Losses = dict[tuple[str, Pattern], NDArray[np.float64]]


def read(path: Path, name: str = "losses") -> Losses:
    """Read `losses` or `correct` a token of each sequence, by objective and pattern."""
    found: dict[tuple[str, Pattern], dict[int, float]] = {}
    for part, item in recorded(path):
        sums = zip(item.rows, getattr(item, name), item.tokens, strict=True)
        pattern = item.pattern.pattern
        assert pattern is not None  # as `recorded` reads them
        found.setdefault((part, pattern), {}).update({row: value / tokens for row, value, tokens in sums})
    return {key: np.asarray([rows[row] for row in sorted(rows)]) for key, rows in found.items()}


def shown(values: NDArray[np.float64]) -> str:
    return f"{values.mean():+.3f} ±{values.std(ddof=1) / len(values) ** 0.5:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="--output of indexcache-eval")
    parser.add_argument("patterns", nargs="+", metavar="NAME=LETTERS", help="several letters with commas: their mean")
    parser.add_argument("--last", default="recall", help="name of the last source")
    options = parser.parse_args()
    losses = read(options.folder / "work" / "journal.jsonl")
    table = json.loads((options.folder / "eval.json").read_text())["held_out"]
    sources = len(table["sources"])
    dense = next(values for (part, pattern), values in losses.items() if part == "nll" and not pattern.shared_layers)
    last = np.arange(table["sequences"]) >= table["sequences"] * (sources - 1) // sources
    print(f"| pages | pattern | loss | KL | of it {options.last} | others | KL more than the first |")
    print("| -- | -- | -- | -- | -- | -- | -- |")
    for selection in dict.fromkeys(selection_in(pattern) for _, pattern in losses if pattern.shared_layers):
        first = None
        for name, _, letters in (item.partition("=") for item in options.patterns):
            named = [Pattern(roles, selection) for roles in letters.split(",")]
            nll, kl = (np.mean([losses[part, pattern] for pattern in named], axis=0) for part in ("nll", "kl"))
            first = kl if first is None else first
            more = "" if kl is first else shown(kl - first)
            cells = [shown(nll - dense), shown(kl), shown(kl[last]), shown(kl[~last]), more]
            print(f"| {0 if selection is None else selection.pages} | {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
