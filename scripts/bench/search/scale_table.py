"""The table of `scale`: what each row is, its losses beside its reference's, and what training recovers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHARE = "1/4"
DENSE, BASE = "dense", "DSA"
CONTROL = f"{BASE}, trained as long"
UNIFORM, OWN, SEARCHED = (
    f"uniform {SHARE}, trained",
    f"uniform {SHARE}, trained, own layer's loss",
    f"searched {SHARE}, trained",
)


@dataclass(frozen=True)
class Row:
    """A row of the table: the checkpoint that runs with `pattern`, and the row that it is compared with.

    `pattern` is that of `indexcache-distill --pattern`, or `searched` or `similarity` for what the search found.
    """

    name: str
    model: Path
    pattern: str
    reference: str
    seed: int | None = None


def means(results: Sequence[Mapping[str, Any]], name: str, key: str, rows: np.ndarray) -> np.ndarray:
    """Return the mean of each seed of a row, of `losses` or `correct` a token: `[seeds, sequences]`."""
    found = sorted((item for item in results if item["row"] == name), key=lambda item: item["seed"] or 0)
    tokens = np.array([item["tokens"] for item in found], float)[:, rows]
    values = np.array([item[key] for item in found], float)[:, rows]
    kept = tokens[0] > 0
    return np.asarray(values[:, kept] / tokens[:, kept])


def paired(results: Sequence[Mapping[str, Any]], one: str, other: str) -> list[Mapping[str, Any]]:
    """Return the results of two rows, of the seeds that both have; a row that trained nothing has all."""
    seeds = [{item["seed"] for item in results if item["row"] == name} for name in (one, other)]
    both = set.union(*seeds) if {None} in seeds else set.intersection(*seeds)
    return [item for item in results if item["row"] in (one, other) and item["seed"] in both]


def table(results: Sequence[Mapping[str, Any]], rows: Sequence[Row], groups: Mapping[str, np.ndarray]) -> str:
    """Make a Markdown table: each loss, and the difference from the row's reference with its standard error.

    Differences are paired by sequence. With several seeds each sequence's mean over them counts.
    """
    lines = ["| | seeds |" + "".join(f" {name} loss | {name} right |" for name in groups)]
    lines.append("|---|---:|" + "---:|---:|" * len(groups))
    lines[0] = lines[0].replace(" text right |", "")
    lines[1] = lines[1][: -len("---:|")]
    for name, reference in dict.fromkeys((row.name, row.reference) for row in rows):
        count = sum(item["row"] == name for item in results)
        cells = [name, str(count)]
        for group, numbers in groups.items() if count else ():
            cell = f"{means(results, name, 'losses', numbers).mean():.4f}"
            both = paired(results, name, reference)
            if name != reference and {item["row"] for item in both} == {name, reference}:
                ours, theirs = (means(both, item, "losses", numbers).mean(0) for item in (name, reference))
                change = ours - theirs
                cell += f" ({change.mean():+.4f} ±{change.std(ddof=1) / len(change) ** 0.5:.4f})"
            cells.append(cell)
            if group != "text":
                cells.append(f"{means(results, name, 'correct', numbers).mean():.1%}")
        cells += [] if count else ["not run"] * (lines[0].count("|") - 3)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def recovered(results: Sequence[Mapping[str, Any]], groups: Mapping[str, np.ndarray]) -> str:
    """Say how much of what training-free uniform loses the trained ones recover, by group and seed."""
    lines, free = [], f"uniform {SHARE}, training-free"
    done = {item["row"] for item in results}
    for group, numbers in groups.items():
        for name in (UNIFORM, OWN):
            both = paired(results, name, CONTROL)
            if {item["row"] for item in both} != {name, CONTROL} or not {free, BASE} <= done:
                continue
            lost = (means(results, free, "losses", numbers) - means(results, BASE, "losses", numbers)).mean()
            left = (means(both, name, "losses", numbers) - means(both, CONTROL, "losses", numbers)).mean(1)
            shares = ", ".join(f"{1 - item / lost:.0%}" for item in left)
            lines.append(f"{name}, {group}: {1 - left.mean() / lost:.0%} of {lost:+.4f} recovered (by seed: {shares})")
    return "\n".join(lines)
