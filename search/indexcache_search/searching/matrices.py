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
    """Matrices that are measured when first used, on a part of the calibration set, and kept in the journal."""

    def __init__(self, engine: Engine, calibration: TokenSet, journal: Journal) -> None:
        self._engine, self._journal = engine, journal
        self._sample = calibration.taken(growing_shares(calibration, MATRIX_SEQUENCES)[0])

    def measured(self, name: str) -> NDArray[np.float64] | None:
        """Return a matrix by its name, see `Engine.matrix`; `None` where the engine can't measure it."""
        if self.known(name) is None and (measured := self._engine.matrix(name, self._sample, ROWS)) is not None:
            self._journal.add_matrix(self._key(name), measured.tolist())
        return self.known(name)

    def known(self, name: str) -> NDArray[np.float64] | None:
        """Return a matrix that was measured; `None` if it was not yet."""
        recorded = self._journal.matrix(self._key(name))
        return None if recorded is None else np.asarray(recorded)

    def _key(self, name: str) -> str:
        selection = self._engine.model.native.selection
        kept = name if name == SIMILARITY else f"{name}-{ROWS}"
        return kept if selection is None else f"{kept} {selection}"
