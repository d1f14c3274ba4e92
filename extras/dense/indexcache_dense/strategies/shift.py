"""DELTA's calibrator: layers whose attention differs most from the layer below (arXiv 2510.09883, Sections 4 and D)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexcache_search.strategies.measured import MeasuredStrategy
from sglang_indexcache import Pattern

FIXED = 3  # the paper's first layers: two that attend to everything, and one that also selects


def shift_pattern(shift: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
    """Keep the first layers, and in each equal part of the others the one with the largest shift.

    The paper asks for "large shifts" that are "well distributed", without a rule; this rule is the project's.

    Args:
        shift: `[layers]`, distance of each layer's attention from that of the layer below.
        full_layers: number of `D` layers.
        native: the model's own pattern.
    """
    first = list(range(min(FIXED, full_layers)))
    wanted = full_layers - len(first)
    parts = np.array_split(np.arange(len(first), len(shift)), wanted) if wanted else []
    return native.keeping([*first, *(int(part[np.argmax(shift[part])]) for part in parts)])


class Shift(MeasuredStrategy):
    """Calibrator of the DELTA paper."""

    name = "shift"
    summary = "dense models: no pattern, but how far attention moves from layer to layer (DELTA's calibrator)"
    dense = True

    def pattern(self, matrix: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
        """Derive a pattern by `shift_pattern`."""
        return shift_pattern(matrix[0], full_layers, native)
