"""How long a search takes, as an extension says by an entry point of the group `indexcache.forecasts`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from indexcache_search.errors import SearchError
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.searching.begin import Begun
from indexcache_search.searching.job import SearchJob
from sglang_indexcache.io.extensions import first_made


class Elapsed:
    """How long a search has run; a forecaster's also knows what is done of it and what is left.

    Args:
        clock: returns seconds, which rise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()

    @property
    def elapsed(self) -> float:
        """Seconds of this run."""
        return max(self._clock() - self._start, 0.0)

    @property
    def share(self) -> tuple[float, float] | None:
        """Bounds of the share that is done; `None` if not known."""
        return None

    def pause(self) -> None:
        """Don't count the time since the last evaluation as one of the next."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """Take an evaluation into account, which just ran or which the journal had."""

    def done(self) -> str:
        """Say what share is done, before the time that it took."""
        return "running for"

    def rest(self) -> str:
        """Say how long the rest takes."""
        return "time left not known"

    def __str__(self) -> str:
        minutes, seconds = divmod(int(self.elapsed), 60)
        return f"{self.done()} {minutes // 60}:{minutes % 60:02}:{seconds:02}, {self.rest()}"


class Forecaster(ABC):
    """Says how long a search takes."""

    @abstractmethod
    def time_left(self, begun: Begun) -> Elapsed:
        """Return what follows a search while it runs."""

    @abstractmethod
    def estimate(self, job: SearchJob, hourly_price: float | None) -> str:
        """Run the first minute of a search, which its journal keeps; return what all of it takes, for people.

        Raises:
            IndexCacheError: as `run.run`.
        """


def time_left(begun: Begun) -> Elapsed:
    """Return what follows a search while it runs; without an extension it knows how long that has been."""
    found = _forecaster()
    return Elapsed() if found is None else found.time_left(begun)


def estimate(job: SearchJob, hourly_price: float | None) -> str:
    """Return what a search takes, see `Forecaster.estimate`.

    Raises:
        SearchError: if no extension says it.
    """
    found = _forecaster()
    if found is None:
        raise SearchError("--estimate needs an extension that is not installed")
    return found.estimate(job, hourly_price)


def _forecaster() -> Forecaster | None:
    found: Forecaster | None = first_made("forecasts", Forecaster)
    return found
