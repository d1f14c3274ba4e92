"""Cross-layer measurements of a search, journalled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet, growing_shares
from indexcache_search.engines.base import Engine
from indexcache_search.journal import Journal

MATRIX_SEQUENCES = 8  # that matrices are measured on: each gives means over hundreds of queries


class Matrices:
    """Measured when they are asked for, on a part of the calibration set.

    Args:
        engine: measures.
        calibration: the whole set.
        journal: remembers.
    """

    def __init__(self, engine: Engine, calibration: TokenSet, journal: Journal) -> None:
        self._engine, self._journal = engine, journal
        self._sample = calibration.taken(growing_shares(calibration, MATRIX_SEQUENCES)[0])

    def similarity(self) -> NDArray[np.float64] | None:
        """Cross-layer output similarity `[layers, layers]`; None where the engine can't measure it."""
        return self._matrix("similarity", lambda: self._engine.output_similarity(self._sample))

    def overlap(self, rows: int) -> NDArray[np.float64] | None:
        """Cross-layer index overlap `[layers, layers]` over `rows` queries a sequence; None likewise."""
        return self._matrix(f"overlap-{rows}", lambda: self._engine.topk_overlap(self._sample, rows))

    def _matrix(self, name: str, measure: Callable[[], NDArray[np.float64] | None]) -> NDArray[np.float64] | None:
        recorded = self._journal.matrix(name)
        if recorded is None:
            measured = measure()
            if measured is None:
                return None
            recorded = measured.tolist()
            self._journal.add_matrix(name, recorded)
        return np.asarray(recorded)
