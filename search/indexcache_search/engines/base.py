"""Protocol of engines, which evaluate patterns on tokens for a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.evaluation.identity import Identified
from indexcache_search.evaluation.losses import Evaluates

OVERLAP, SIMILARITY = "overlap", "similarity"

Result = TypeVar("Result")


class Engine(Evaluates, Identified, Protocol):
    """Runner of a model under any pattern, switched without a restart.

    Attributes:
        lanes: how many patterns it evaluates at once.
        measures: what it measures besides losses, see `matrix`.
    """

    @property
    def lanes(self) -> int:
        """See above."""
        ...

    @property
    def measures(self) -> frozenset[str]:
        """See above."""
        ...

    def matrix(self, name: str, data: TokenSet, rows: int) -> NDArray[np.float64] | None:
        """Return a measurement of the model's layers; `None` if the engine can't measure it.

        Args:
            name: `overlap`: the mean of |T_i & T_j| / |T_i|, where T_i are the tokens that layer i selects,
                `[layers, layers]` (paper, Appendix A). `similarity`: the mean cosine of layer i's attention outputs
                with its own and layer j's indices, `[i, j]`, j <= i; all layers below i run with the checkpoint's own
                pattern (paper, Appendix C). Engines of extras may know more.
            data: the sequences.
            rows: sampled queries per sequence, where queries are sampled.
        """
        ...

    def check_unchanged(self) -> None:
        """Check, before results are written, that the model is still the one that was loaded.

        Raises:
            IndexCacheError: if a file of the model changed; the error names it.
        """
        ...


@runtime_checkable
class TimesPrompts(Protocol):
    """An engine on calibration servers, on which prompts can be timed, too."""

    def anywhere(self, work: Callable[[CalibrationServer], Result]) -> Result:
        """Run `work` on a server, and return its result; if the server is lost meanwhile, anew on another one.

        Raises:
            SearchError: if a server refuses, or none came back.
        """
        ...
