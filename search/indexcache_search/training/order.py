"""The order in which steps take sequences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Order:
    """An endless stream of rows: every epoch takes each row once, shuffled anew.

    Args:
        rows: number of rows.
        seed: seed of the shuffles; the same seed gives the same stream everywhere.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def step(self, step: int, batch_size: int) -> NDArray[np.int64]:
        """Return the rows of a step, counted from 0."""
        return np.array([self._at(position) for position in range(step * batch_size, (step + 1) * batch_size)])

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, self._rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
        return int(self._permutation[within])
