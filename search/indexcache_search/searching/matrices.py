"""Cross-layer measurements of a search, journalled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet, growing_shares
from indexcache_search.engines.base import Engine
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
        """Return a matrix by its name; None where the engine can't measure it.

        `overlap` of what layers choose and `similarity` of their outputs, both `[layers, layers]`; of dense models
        `shift`, `[1, layers]`, and `recall`, `[layers, layers]`, see `page_signals`.
        """
        if name == "overlap" and not self._engine.model.dense:
            return self._matrix(f"overlap-{ROWS}", lambda: self._engine.topk_overlap(self._sample, ROWS))
        if name == "similarity":
            return self._matrix(name, lambda: self._engine.output_similarity(self._sample))
        return self._matrix(f"{name}-{ROWS}", lambda: self._signals.get(name))

    @cached_property
    def _signals(self) -> Mapping[str, NDArray[np.float64]]:
        return self._engine.page_signals(self._sample, ROWS)

    def _matrix(self, name: str, measure: Callable[[], NDArray[np.float64] | None]) -> NDArray[np.float64] | None:
        selection = self._engine.model.native.selection
        name = name if selection is None else f"{name} {selection}"
        recorded = self._journal.matrix(name)
        if recorded is None:
            measured = measure()
            if measured is None:
                return None
            recorded = measured.tolist()
            self._journal.add_matrix(name, recorded)
        return np.asarray(recorded)
