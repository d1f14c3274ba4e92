"""How much of a search is done, and how long the rest takes: bounds that follow what was measured."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from indexcache_forecast.forecast import reckoned
from indexcache_forecast.stand_in import Pace
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.searching.begin import Begun
from indexcache_search.searching.forecasts import Elapsed

_FIRST = 3.0  # seconds before which nothing is said: a search that is over by then needs none of it
_DUTY, _PATIENCE = 0.02, 2.0  # share of the time that looking ahead may take later, and seconds that a look may
_DRAWS = 3  # of what was not measured, by which bounds differ
_SURE, _UNSURE = 0.15, 0.35  # share by which bounds lie further apart, and a share of what is missing
_RECENT = 32  # evaluations by which the machine's speed is judged
_UNITS = ((90, 5, 1, "s"), (5400, 1, 60, "min"), (172_800, 1, 3600, "h"), (math.inf, 1, 86400, "d"))
"""For times below so many seconds: the step to which they are rounded, the unit's seconds and its name."""


class TimeLeft(Elapsed):
    """Simulates the rest of a search now and then, by the time that evaluations of this run take.

    Before the first that this run did, nothing is said of time: those of an earlier one may be another machine's.

    Args:
        begun: the search.
        clock: returns seconds, which rise.
    """

    def __init__(self, begun: Begun, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._begun, self._last = begun, self._start
        self._records, self._next = begun.journal.records, _FIRST
        self._recent: deque[tuple[float, Evaluation]] = deque(maxlen=_RECENT)
        self._pace = Pace(0.0, 0.0, 0.0)
        self._done = self._low = self._high = 0.0  # seconds at it: behind (0: not known), and bounds of those ahead

    def pause(self) -> None:
        """See `Elapsed.pause`."""
        self._last = self._clock()

    def evaluated(self, evaluation: Evaluation) -> None:
        """See `Elapsed.evaluated`."""
        records, self._records = self._records, self._begun.journal.records
        if self._records > records:
            self._recent.append((max(self._clock() - self._last, 0.0), evaluation))
            ran = self._seconds(evaluation)
            self._done, self._low, self._high = self._done + ran, self._low - ran, self._high - ran
        if (began := self.elapsed) >= self._next:
            with suppress(Exception):  # whatever is wrong with it, the search goes on
                self._look(time.monotonic() + max(_PATIENCE, _DUTY * began))
            self._next = began + max(min((self.elapsed - began) / _DUTY, 2 * began), 1.0)
        self.pause()

    def _look(self, until: float) -> None:
        recent = [item for _, item in self._recent] or self._begun.journal.known("calibration")
        pace = Pace.fitted(recent, self._begun.calibration.seq_len)
        looks = [reckoned(self._begun, pace, seed, until) for seed in range(_DRAWS)]
        low, *_, high = sorted(look.missing for look in looks)
        self._pace, self._done = pace, looks[0].seconds - looks[0].missing
        margin = _SURE + _UNSURE * high / max(self._done + high, high, 1e-9)
        self._low, self._high = low * (1 - margin), high * (1 + margin)

    def _seconds(self, evaluation: Evaluation) -> float:
        return self._pace.of(evaluation, self._begun.calibration.seq_len) / self._begun.engine.lanes

    @property
    def share(self) -> tuple[float, float] | None:
        """Bounds of the share that is done; `None` if not known."""
        ends = [self._done / max(self._done + max(left, 0.0), 1e-9) for left in (self._high, self._low)]
        return (ends[0], ends[1]) if self._done else None

    @property
    def left(self) -> tuple[float, float] | None:
        """Bounds of the seconds left; `None` if not known, or where all that was expected is over."""
        if not self._done or not self._recent:
            return None
        spent, items = zip(*list(self._recent), strict=True)
        rate = sum(spent) / max(sum(map(self._seconds, items)), 1e-9)
        idle = max(self._clock() - self._last, 0.0)
        low, high = (left * rate - idle for left in (self._low, self._high))
        return (max(low, 0.0), high) if high > 0 else None

    def done(self) -> str:
        """See `Elapsed.done`."""
        share = self.share
        return super().done() if share is None else f"{_span(*(min(int(100 * item), 99) for item in share))} % done in"

    def rest(self) -> str:
        """See `Elapsed.rest`."""
        left = self.left
        return super().rest() if left is None else f"{time_words(*left)} left"


def time_words(low: float, high: float) -> str:
    """Return bounds of seconds for people, rounded outwards: `2 to 4 min`."""
    _, step, size, unit = next(item for item in _UNITS if high < item[0])
    return f"{_span(int(low / size // step * step), math.ceil(high / size / step) * step)} {unit}"


def _span(low: int, high: int) -> str:
    return f"{high}" if low == high else f"{low} to {high}"
