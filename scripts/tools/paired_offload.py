"""Plans of one indexcache-offload beside each other, paired by sequence: a table of docs/lab/eviction.md.

    python -m scripts.tools.paired_offload indexcache-offload --last recall

By plan: increase of the loss, KL to attention to everything, how much more KL than the first plan has; the share of
tokens that are the likeliest, of the last source and of the others; and the blocks that a step brings by the
size of the buffer, all layers together, pages or tokens. ± is the standard error over sequences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scripts.tools.paired_table import read, shown


def rows(folder: Path, last_sequences: int) -> Iterator[list[str]]:
    """Yield the rows of the table, the baseline first."""
    journal, content = folder / "work" / "journal.jsonl", json.loads((folder / "offload.json").read_text())
    losses, hits = read(journal), read(journal, "correct")
    patterns = {(item.roles, None if item.selection is None else str(item.selection)): item for _, item in hits}
    first = None
    last = np.arange(content["sequences"]) >= content["sequences"] - last_sequences
    baseline = patterns[content["plans"][0]["pattern"], content["plans"][0]["selection"]]
    for plan in content["plans"]:
        pattern = patterns[plan["pattern"], plan["selection"]]
        nll, kl = losses["nll", pattern] - losses["nll", baseline], losses["kl", pattern]
        more = "" if first is None else shown(kl - first)
        if pattern != baseline and first is None:
            first = kl
        accuracy = [f"{hits['nll', pattern][part].mean():.1%}" if part.any() else "" for part in (last, ~last)]
        brought = [f"{buffer['exposed']['mean'] + buffer['hidden']['mean']:.1f}" for buffer in plan["buffers"]]
        yield [plan["name"], shown(nll), shown(kl), more, *accuracy, *brought]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="--output of indexcache-offload")
    parser.add_argument("--last", default="recall", help="name of the last source")
    parser.add_argument("--last-sequences", type=int, default=2, help="sequences of it")
    options = parser.parse_args()
    content = json.loads((options.folder / "offload.json").read_text())
    sizes = [f"{buffer['times']:g}x" for buffer in content["plans"][-1]["buffers"]]
    titles = ["plan", "loss", "KL", "KL more than the first", f"{options.last} right", "others right", *sizes]
    print("| " + " | ".join(titles) + " |\n|" + " -- |" * len(titles))
    for cells in rows(options.folder, options.last_sequences):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
