"""Tables of what `language_model` measured, in Markdown: losses, divergences, paired differences, letters.

    python -m scripts.bench.search.language_table build/language/eval-4096
    python -m scripts.bench.search.language_table build/language/trained-4096.json

Reads the folder of a comparison: names and patterns from `eval.json`, losses of each sequence from its journal, which
may lack some; a pattern that was not run on all sequences is left out, and named. A row of several patterns (seeds,
phases) has the mean over them for each sequence, and errors are over sequences. *Worst* is the largest increase of one
sequence under one pattern. *Keys* are three RULER-like tasks.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.bench.search.language_model import BLOCKS, SHARES, TIMES
from sglang_indexcache import Pattern

COLUMNS = {
    "text": ("held-out-text",),
    "code": ("held-out-code",),
    "recall": ("held-out-recall",),
    "keys": ("multi_key", "multi_value", "multi_query"),
    "tracing": ("variable_tracking",),
    "common words": ("common_words",),
    "MRCR-like": ("mrcr",),
}
LABELS = {
    "similarity": "similarity {}",
    "algorithm1": "Algorithm 1 {}, a quarter of the sequences",
    "some": "searched {}, a quarter of the sequences",
    "few": "searched {}, an eighth of the sequences",
    "tasks": "searched {}, tasks in the calibration",
}
RUNS = ("own", "untrained", "trained")
Values = NDArray[np.float64]


@dataclass
class Measured:
    """Losses, divergences and right answers of one comparison.

    Attributes:
        patterns: by name, uniform ones as `uniform SHARE PHASE`.
        columns: sequences of each group of sources.
        per_token: by `nll` or `kl` and pattern, of each sequence.
        right: share of the scored tokens that the model predicts, by pattern.
        lacking: names of patterns that were not run on all sequences.
    """

    patterns: dict[str, str]
    columns: dict[str, NDArray[np.int64]]
    per_token: dict[tuple[str, str], Values] = field(default_factory=dict)
    right: dict[str, Values] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Measured:
        """Read the folder of a comparison."""
        held_out = json.loads((folder / "eval.json").read_text())["held_out"]
        own: str = next(row for row in held_out["rows"] if row["kind"] == "baseline")["pattern"]
        rows = [row for row in held_out["rows"] if row["kind"] in ("named", "phase")]
        patterns = {_name(row): Pattern.parse(row["pattern"]).key for row in rows}
        sizes = {source: item["loss"]["degrees"] + 1 for source, item in rows[0]["by_source"].items()}
        found = cls({"own": Pattern.parse(own).key, **patterns}, _columns(sizes))
        parts: dict[tuple[str, str], dict[int, tuple[float, float]]] = defaultdict(dict)
        for line in (folder / "work" / "journal.jsonl").read_text().splitlines():
            record = json.loads(line)
            if "losses" in record and not record["repeat"]:
                lists = (record[name] for name in ("rows", "losses", "correct", "tokens"))
                parts[record["set"], record["pattern"]] |= {
                    row: (loss / tokens, right / tokens) for row, loss, right, tokens in zip(*lists, strict=True)
                }
        for (kind, key), by_row in parts.items():
            if len(by_row) == sum(sizes.values()):
                values = np.array([by_row[row] for row in range(len(by_row))])
                found.per_token[kind, key], found.right[key] = values[:, 0], values[:, 1]
        found.lacking = [name for name, key in found.patterns.items() if ("nll", key) not in found.per_token]
        return found

    def increase(self, names: Sequence[str]) -> Values:
        """Return the increase of the loss over the model's own, `[patterns, sequences]`."""
        own = self.per_token["nll", self.patterns["own"]]
        return np.stack([self.per_token["nll", self.patterns[name]] - own for name in names])

    def groups(self) -> dict[str, list[str]]:
        """Return the rows of the table, each with names of patterns that were run on all sequences."""
        there = [name for name in self.patterns if name not in self.lacking]
        rows: dict[str, list[str]] = {}
        for share in SHARES:
            short = share.replace("/", "of")
            seeds = [name for name in there if name.startswith("seed") and name.endswith(f"-{short}")]
            rows[f"searched {share}"] = [name for name in seeds if "tokens" not in name]
            phases = [name for name in there if name.startswith(f"uniform {share} ")]
            if phases:
                best = min(phases, key=lambda name: float(self.increase([name]).mean()))
                rows[f"uniform {share}, the best phase"] = [best]
                rows[f"uniform {share}, the paper's phase"] = [f"uniform {share} 0"]
                rows[f"uniform {share}, mean of {len(phases)} phases"] = phases
            for kind, label in LABELS.items():
                rows[label.format(share)] = [name for name in there if name == f"{kind}-{short}"]
            for name in seeds:
                if "tokens" in name:
                    rows[f"searched {share} at {name.split('-')[1]} tokens"] = [name]
        for time in TIMES:
            rows[f"blocks, searched within {time}"] = [
                name for name in there if name.startswith("seed") and name.endswith(f"-{time}")
            ]
            rows[f"within {time}, tasks in the calibration"] = [name for name in there if name == f"tasks-{time}"]
        for size in BLOCKS:
            rows[f"all F, q{size}"] = [name for name in there if name == f"all-q{size}"]
        return {row: names for row, names in rows.items() if names}


def _name(row: Mapping[str, Any]) -> str:
    return str(row["name"]) if row["kind"] == "named" else f"uniform {row['retention']} {row['phase']}"


def _columns(sizes: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
    ends = np.cumsum(list(sizes.values()))
    rows = {
        Path(source).name: np.arange(end - size, end) for (source, size), end in zip(sizes.items(), ends, strict=True)
    }
    found = {
        column: [rows[name] for name in rows for start in starts if name.startswith(start)]
        for column, starts in COLUMNS.items()
    }
    return {column: np.concatenate(parts) for column, parts in found.items() if parts}


def _mean(values: Values) -> str:
    return f"{values.mean():+.3f} ±{values.std(ddof=1) / len(values) ** 0.5:.3f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table, the first column to the left."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    lines.insert(1, "| -- |" + " -: |" * (len(head) - 1))
    return "\n".join(lines)


def losses(found: Measured) -> str:
    """Return the table of losses."""
    own, rows = found.per_token["nll", found.patterns["own"]], list[list[str]]()
    rows.append(["the model's own", "1", *(f"{own[at].mean():.3f}" for at in found.columns.values()), ""])
    for row, names in found.groups().items():
        every = found.increase(names)
        cells = [_mean(every.mean(0)[at]) for at in found.columns.values()]
        worst = np.unravel_index(every.argmax(), every.shape)
        where = next(column for column, at in found.columns.items() if worst[1] in at)
        rows.append([row, str(len(names)), *cells, f"{every[worst]:.2f}, {where}"])
    return table(["", "patterns", *found.columns, "worst"], rows)


def divergences(found: Measured) -> str:
    """Return the table of divergences and of right tokens."""
    rows = []
    for row, names in {"the model's own": ["own"], **found.groups()}.items():
        keys = [found.patterns[name] for name in names]
        kl = np.mean([found.per_token["kl", key] for key in keys], 0)
        right = np.mean([found.right[key] for key in keys], 0)
        cells = [f"{kl[at].mean():.3f}, {right[at].mean():.1%}".replace("%", " %") for at in found.columns.values()]
        rows.append([row, *cells])
    return table(["KL, right tokens", *found.columns], rows)


def differences(found: Measured) -> str:
    """Return what a search at 1/2, 1/4 and 1/8 loses less than the others; negative: it loses less."""
    rows, groups = list[list[str]](), found.groups()
    for share in SHARES:
        if f"searched {share}" not in groups:
            continue
        base = found.increase(groups[f"searched {share}"]).mean(0)
        blocks = [row for row in groups if row.startswith("blocks")] if share == "1/4" else []
        for row in (*(row for row in groups if share in row and row != f"searched {share}"), *blocks):
            change = base - found.increase(groups[row]).mean(0)
            rows.append([f"searched {share} - {row}", *(_mean(change[at]) for at in found.columns.values())])
    return table(["difference", *found.columns], rows)


def letters(found: Measured) -> str:
    """Return the patterns that searches found, and who found them."""
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name, key in found.patterns.items():
        if not name.startswith(("uniform", "all-", "own")):
            by_pattern[key].append(name)
    return table(["pattern", "found by"], [[f"`{key}`", ", ".join(names)] for key, names in by_pattern.items()])


def trained(path: Path) -> str:
    """Return the table of `trained-LENGTH.json`: what a pattern loses before and after training with it."""
    by_source = json.loads(path.read_text())
    columns = _columns({source: len(runs["own"]["losses"]) for source, runs in by_source.items()})
    values = {run: np.concatenate([runs[run]["losses"] for runs in by_source.values()]) for run in RUNS}
    own = values["own"]
    rows = [["all F", *(f"{own[at].mean():.3f}" for at in columns.values())]]
    for name, change in (
        ("pattern, not trained", values["untrained"] - own),
        ("pattern, trained", values["trained"] - own),
        ("what training gains", values["trained"] - values["untrained"]),
    ):
        rows.append([name, *(_mean(change[at]) for at in columns.values())])
    return table(["", *columns], rows)


def main(options: argparse.Namespace) -> None:
    if options.result.suffix == ".json":
        print(trained(options.result))
        return
    found = Measured.read(options.result)
    print("\n\n".join(part(found) for part in (losses, divergences, differences, letters)))
    for name in found.lacking:
        print(f"{name}: not run on all sequences")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="eval-LENGTH or trained-LENGTH.json of language_model's --output")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
