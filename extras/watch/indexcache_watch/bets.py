"""Bets that the mean of a stream of changes leaves what is allowed: evidence that may be looked at after each change.

The hypothesis is about changes that are cut off on both sides, at places that earlier changes alone decide: whatever
came before, the next cut-off change is expected between `-allowed` and `allowed`. A bet that changes rise multiplies
its wealth by `1 + stake * (cut_off - allowed)`. Its stake, too, comes from earlier changes alone, and is so small that
this is never negative; under the hypothesis its expectation is at most 1. So wealth is a supermartingale that begins at
1, whatever the changes are, and reaches 1 / alpha with a probability of at most alpha (Ville 1939). The same holds of
the bet that changes fall, and of the mean of both. See Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", Journal of the Royal Statistical Society B 86(1), 2024 (arXiv 2010.09686). Stakes are close to
those under which wealth grows the fastest, by the mean and the variance of late (their aGRAPA).

Without a cut there is no such bound: a mean of 0 in which one of a million requests loses a million nats looks like any
other until that one comes. With a cut on one side there is none either: cutting a mean of 0 from below raises it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST_CUT, LARGEST_CUT = 2.0, 10.0
"""Nats a token. A cut is the largest change on its side so far, within these; at least twice what is allowed."""
_LEAST_VARIANCE = 0.4
"""What stakes take the variance for at least: a few requests that agree may do so by chance."""
_MEMORY = 80.0  # requests after which one counts a third in the stakes, so that what is new is seen
_MOST = 0.95  # share of its wealth that a bet can lose on one change
_SIGNS = np.array([1.0, -1.0])  # the first bet is that changes rise, the second that they fall


class Bets:
    """Two bets on each of some streams.

    Args:
        allowed: nats a token, see above.
        streams: shape of what `add` takes; by default one change at a time.
    """

    def __init__(self, allowed: float, streams: tuple[int, ...] = ()) -> None:
        self._allowed, self._signs = allowed, _SIGNS.reshape(2, *(1 for _ in streams))
        self._bounds = max(LEAST_CUT, 2 * allowed), max(LARGEST_CUT, 2 * allowed)
        self._cuts = np.full((2, *streams), self._bounds[0])  # above, and below
        self._log_wealth = np.zeros((2, *streams))
        self._weight, self._mean, self._square = 0.0, np.zeros(streams), np.zeros(streams)

    def add(self, change: ArrayLike) -> NDArray[np.float64]:
        """Bet on the next change of each stream, `[*streams]` in nats a token; return them cut off."""
        found = np.asarray(change, np.float64)
        cut_off = np.clip(found, -self._cuts[1], self._cuts[0])
        self._log_wealth += np.log1p(self._stakes() * (self._signs * cut_off - self._allowed))
        self._weight = 1 + self._weight * (1 - 1 / _MEMORY)
        self._mean = self._mean + (cut_off - self._mean) / self._weight
        self._square = self._square + (cut_off**2 - self._square) / self._weight
        self._cuts = np.clip(np.maximum(self._cuts, self._signs * found), *self._bounds)
        return cut_off

    def _stakes(self) -> NDArray[np.float64]:
        """Return the stakes of the next bets, `[2, *streams]`, from what was added before."""
        beyond = np.maximum(self._signs * self._mean - self._allowed, 0.0)
        variance = np.maximum(self._square - self._mean**2, _LEAST_VARIANCE)
        most = _MOST / (self._cuts[::-1] + self._allowed)
        found: NDArray[np.float64] = np.minimum(beyond / (variance + beyond**2), most)
        return found

    @property
    def log_evidence(self) -> NDArray[np.float64]:
        """Logarithm of the mean wealth of both bets, `[*streams]`."""
        found: NDArray[np.float64] = np.logaddexp(self._log_wealth[0], self._log_wealth[1]) - np.log(2)
        return found
