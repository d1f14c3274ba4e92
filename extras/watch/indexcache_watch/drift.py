"""A sequential test whether the losses of two servers differ by more than allowed, at whatever time one looks.

Requests need not be independent, nor of one distribution, so traffic may change. What is tested, and why the bound on
false alarms holds, is in `bets`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from indexcache_watch.bets import Bets


class Bucket:
    """Requests of similar length.

    Attributes:
        name: its lengths, such as `2049-8192`.
        requests: how many were added.
        tokens: how many of their tokens counted.
        mean: mean difference, nats a token; each request counts the same.
        cut_mean: the same of the differences as they were tested, cut off.
        breached: whether the evidence has ever reached the limit.
    """

    def __init__(self, name: str, allowed: float) -> None:
        self.name, self.requests, self.tokens, self.breached = name, 0, 0, False
        self.mean, self.cut_mean, self._squares, self._bets = 0.0, 0.0, 0.0, Bets(allowed)

    @property
    def stderr(self) -> float | None:
        """Standard error of `mean`; `None` of fewer than two requests."""
        return math.sqrt(self._squares / (self.requests * (self.requests - 1))) if self.requests > 1 else None

    @property
    def log_evidence(self) -> float:
        """Logarithm of the evidence against the hypothesis, see `Bets`."""
        return float(self._bets.log_evidence)

    def add(self, change: float, tokens: int) -> None:
        """Add a request whose loss differs by `change` nats a token, over so many `tokens`."""
        self.requests += 1
        self.tokens += tokens
        before, self.mean = self.mean, self.mean + (change - self.mean) / self.requests
        self._squares += (change - before) * (change - self.mean)
        self.cut_mean += (float(self._bets.add(change)) - self.cut_mean) / self.requests


class DriftTest:
    """Test of the hypothesis that in each bucket the next cut-off difference is expected to be within what is allowed.

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
