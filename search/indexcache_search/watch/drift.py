"""A sequential test whether the losses of two servers differ by more than allowed, at whatever time one looks.

Each request bets against the null hypothesis, with constant stakes: the wealth of a bet is a supermartingale while the
hypothesis holds, so it ever exceeds 1 / alpha with a probability of at most alpha (Ville 1939). A mean of bets is one,
too, so nobody chooses the stake. See Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
betting", Journal of the Royal Statistical Society B 86(1), 2024 (arXiv 2010.09686).

What it assumes: whatever came before, the next request's expected difference is within what is allowed. Requests need
not be independent, nor of one distribution, so traffic may change.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

FLOOR = 1.0
"""Nats a token that one request may count against a finding; no bet loses more than all of its wealth."""
_STAKES = np.tile(np.geomspace(1 / 64, 0.95, 12), 2)  # shares of a bet's wealth that the worst request takes
_SIGNS = np.repeat([1.0, -1.0], 12)  # half of the bets are that the loss rises, half that it falls


class Bucket:
    """Requests of similar length.

    Attributes:
        name: its lengths, such as `2049-8192`.
        requests: how many were added.
        tokens: how many of their tokens counted.
        mean: mean difference, nats a token; each request counts the same.
        breached: whether the evidence has ever reached the limit.
    """

    def __init__(self, name: str, allowed: float) -> None:
        self.name, self.requests, self.tokens, self.mean, self.breached = name, 0, 0, 0.0, False
        self._allowed, self._squares = allowed, 0.0
        self._factors, self._wealth = _STAKES / (FLOOR + allowed), np.zeros(len(_STAKES))

    @property
    def stderr(self) -> float | None:
        """Standard error of `mean`; `None` of fewer than two requests."""
        return math.sqrt(self._squares / (self.requests * (self.requests - 1))) if self.requests > 1 else None

    @property
    def log_evidence(self) -> float:
        """Logarithm of the mean wealth of all bets: an e-value against the null hypothesis."""
        most = float(self._wealth.max())
        return most + math.log(float(np.exp(self._wealth - most).mean()))

    def add(self, change: float, tokens: int) -> None:
        """Add a request whose loss differs by `change` nats a token, over so many `tokens`."""
        self.requests += 1
        self.tokens += tokens
        before, self.mean = self.mean, self.mean + (change - self.mean) / self.requests
        self._squares += (change - before) * (change - self.mean)
        self._wealth += np.log1p(self._factors * (np.maximum(_SIGNS * change, -FLOOR) - self._allowed))


class DriftTest:
    """Test of the null hypothesis that in each bucket the mean difference is between -`allowed` and `allowed`.

    Both signs count: text that a server wrote itself is likelier to it than to any other, so a broken pattern lowers
    the loss of its own replies, and raises the loss of others'.

    Args:
        edges: ascending; a bucket ends with a request of so many tokens, the last has none.
        allowed: nats a token.
        alpha: largest probability that any bucket is ever breached while the hypothesis holds.
    """

    def __init__(self, edges: Sequence[int], allowed: float, alpha: float) -> None:
        self._edges = list(edges)
        first = [1, *(edge + 1 for edge in edges)]
        names = [f"{one}-{last}" for one, last in zip(first, edges, strict=False)]
        self.buckets = [Bucket(name, allowed) for name in (*names, f"{first[-1]}-")]
        self.log_limit = math.log(len(self.buckets) / alpha)

    def add(self, length: int, change: float, tokens: int) -> Bucket:
        """Add a request of `length` tokens; return its bucket."""
        bucket = self.buckets[bisect_left(self._edges, length)]
        bucket.add(change, tokens)
        bucket.breached = bucket.breached or bucket.log_evidence >= self.log_limit
        return bucket

    def evidence(self, bucket: Bucket) -> float:
        """Return the evidence of a bucket relative to the limit: it is breached at 1."""
        return math.exp(min(bucket.log_evidence - self.log_limit, 700.0))

    @property
    def breached(self) -> Bucket | None:
        """The first breached bucket, if any."""
        return next((bucket for bucket in self.buckets if bucket.breached), None)
