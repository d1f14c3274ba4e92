"""Cross-layer measurements of a search, journalled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet, growing_shares
from indexcache_search.engines.base import SIMILARITY, Engine
from indexcache_search.evaluation.journal import Journal

MATRIX_SEQUENCES = 8  # that matrices are measured on: each gives means over hundreds of queries
ROWS = 64  # queries a sequence for what layers choose


class Matrices:
    """Matrices that are measured when first used, on a part of the calibration set.

    Args:
        engine: measures.
        calibration: the whole set.
        journal: remembers.
    """

    def __init__(self, engine: Engine, calibration: TokenSet, journal: Journal) -> None:
        self._engine, self._journal = engine, journal
        self._sample = calibration.taken(growing_shares(calibration, MATRIX_SEQUENCES)[0])

    def measured(self, name: str) -> NDArray[np.float64] | None:
        """Return a matrix by its name, see `Engine.matrix`; `None` where the engine can't measure it."""
        selection = self._engine.model.native.selection
        kept = name if name == SIMILARITY else f"{name}-{ROWS}"
        kept = kept if selection is None else f"{kept} {selection}"
        recorded = self._journal.matrix(kept)
        if recorded is None:
            measured = self._engine.matrix(name, self._sample, ROWS)
            if measured is None:
                return None
            recorded = measured.tolist()
            self._journal.add_matrix(kept, recorded)
        return np.asarray(recorded)
