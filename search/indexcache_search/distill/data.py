"""Training sequences on disk, and the order in which steps take them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexcache_search.tokens import TokenSet
from sglang_indexcache.files import write_atomically

_ARRAYS = ("tokens", "scored", "source_of")


def save_set(data: TokenSet, folder: Path) -> None:
    """Write a set to `folder`; `load_set` finds it only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(data, name))
    write_atomically(folder / "set.json", json.dumps({"sources": data.sources, "sha256": data.sha256}) + "\n")


def load_set(folder: Path) -> TokenSet | None:
    """The set in `folder`, read as it is used; None if there is none."""
    if not (folder / "set.json").is_file():
        return None
    about = json.loads((folder / "set.json").read_text())
    tokens, scored, source_of = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
    return TokenSet(tokens, scored, source_of, tuple(about["sources"]))


class Order:
    """An endless stream of rows: every epoch takes each row once, shuffled anew.

    Args:
        rows: how many there are.
        seed: of the shuffles; the same seed gives the same stream everywhere.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def step(self, step: int, batch_size: int) -> NDArray[np.int64]:
        """Rows of a step, counted from 0."""
        return np.array([self._at(place) for place in range(step * batch_size, (step + 1) * batch_size)])

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, self._rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
        return int(self._permutation[within])
