"""Plans of indexcache-offload beside each other, paired by sequence: a table of docs/lab/eviction.md.

    python -m scripts.tools.paired_offload indexcache-offload --last recall
    python -m scripts.tools.paired_offload joint key trained --last recall --last-sequences 4

Several folders are counts of the same sequences; plans of the later ones are compared with the first of the first.

By plan: increase of the loss, KL to attention to everything, how much more KL than the first plan has; the share of
tokens that are the likeliest, of the last source and of the others; and the blocks that a step brings by the
size of the buffer, all layers together, pages or tokens. ± is the standard error over sequences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scripts.tools.paired_table import read, shown


def rows(folders: Sequence[Path], last_sequences: int) -> Iterator[list[str]]:
    """Yield the rows of the table, the baseline first.

    Raises:
        SystemExit: if the folders don't count the same sequences.
    """
    first: NDArray[np.float64] | None = None
    truth: NDArray[np.float64] | None = None
    for folder in folders:
        journal, content = folder / "work" / "journal.jsonl", json.loads((folder / "offload.json").read_text())
        losses, hits = read(journal), read(journal, "correct")
        patterns = {(item.roles, None if item.selection is None else str(item.selection)): item for _, item in hits}
        last = np.arange(content["sequences"]) >= content["sequences"] - last_sequences
        baseline = patterns[content["plans"][0]["pattern"], content["plans"][0]["selection"]]
        known, truth = truth, losses["nll", baseline]
        if known is not None and (len(known) != len(truth) or not np.allclose(known, truth, atol=1e-3)):
            raise SystemExit(f"{folder}: the losses of {content['plans'][0]['name']} are not those of {folders[0]}")
        for plan in content["plans"][known is not None :]:
            pattern = patterns[plan["pattern"], plan["selection"]]
            nll, kl = losses["nll", pattern] - truth, losses["kl", pattern]
            more = "" if first is None else shown(kl - first)
            if pattern != baseline and first is None:
                first = kl
            accuracy = [f"{hits['nll', pattern][part].mean():.1%}" if part.any() else "" for part in (last, ~last)]
            brought = [f"{buffer['exposed']['mean'] + buffer['hidden']['mean']:.1f}" for buffer in plan["buffers"]]
            yield [plan["name"], shown(nll), shown(kl), more, *accuracy, *brought]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="--output of indexcache-offload")
    parser.add_argument("--last", default="recall", help="name of the last source")
    parser.add_argument("--last-sequences", type=int, default=2, help="sequences of it")
    options = parser.parse_args()
    content = json.loads((options.folders[0] / "offload.json").read_text())
    sizes = [f"{buffer['times']:g}x" for buffer in content["plans"][-1]["buffers"]]
    titles = ["plan", "loss", "KL", "KL more than the first", f"{options.last} right", "others right", *sizes]
    print("| " + " | ".join(titles) + " |\n|" + " -- |" * len(titles))
    for cells in rows(options.folders, options.last_sequences):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
