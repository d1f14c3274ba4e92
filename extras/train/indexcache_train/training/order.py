"""The order in which steps take sequences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rows_of_step(step: int, batch_size: int, rows: int, seed: int) -> NDArray[np.int64]:
    """Return the rows of a step, counted from 0: every epoch takes each of `rows` once, shuffled anew by `seed`."""
    first, last = divmod(step * batch_size, rows), divmod((step + 1) * batch_size - 1, rows)
    epochs = [np.random.default_rng([seed, epoch]).permutation(rows) for epoch in range(first[0], last[0] + 1)]
    return np.concatenate(epochs)[first[1] :][:batch_size]
