"""DELTA's calibrator: layers whose attention differs most from the layer below (arXiv 2510.09883, Sections 4 and D)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexcache_search.strategies.measured import MeasuredStrategy
from sglang_indexcache import Pattern

FIXED = 3  # the paper's first layers: two that attend to everything, and one that also chooses


def shift_pattern(shift: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
    """The first layers, and in each equal part of the others the one with the largest shift.

    The paper takes "large shifts" that are "well distributed" and gives no rule; this is ours.

    Args:
        shift: `[layers]`, how far each layer's attention lies from that of the layer below.
        full_layers: `D` layers.
        native: the model's own pattern.
    """
    first = list(range(min(FIXED, full_layers)))
    wanted = full_layers - len(first)
    parts = np.array_split(np.arange(len(first), len(shift)), wanted) if wanted else []
    return native.keeping([*first, *(int(part[np.argmax(shift[part])]) for part in parts)])


class Shift(MeasuredStrategy):
    """What the paper of DELTA does."""

    name = "shift"
    summary = "dense models: no pattern, but how far attention moves from layer to layer (DELTA's calibrator)"
    dense = True

    def pattern(self, matrix: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
        return shift_pattern(matrix[0], full_layers, native)
