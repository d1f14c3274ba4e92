"""Traffic for a server: who asks what, and when. The same seed gives the same requests, for whichever server."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read `LOW:HIGH`, or one number.

        Raises:
            ValueError: if these are no positive numbers in order.
        """
        low, _, high = text.partition(":")
        found = cls(int(low), int(high or low))
        if not 1 <= found.low <= found.high:
            raise ValueError(f"found {text}, expected LOW:HIGH with 1 <= LOW <= HIGH")
        return found

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    Attributes:
        wait: seconds after the end of the turn before, or after the beginning of the run.
        new: token ids behind everything that the session has so far.
        output: tokens to generate.
    """

    wait: float
    new: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Session:
    """Requests of which each has those before it, and their answers, as its beginning.

    Attributes:
        prefix: token ids in front of the first turn, which are in the prefix cache before the run begins.
        turns: of the session.
    """

    prefix: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Mixture:
    """Prompts of many lengths that nobody has sent before, at times of their own: a session is one request.

    Attributes:
        lengths: tokens of a prompt; a lognormal distribution is cut to them.
        median: of that distribution, in tokens.
        sigma: standard deviation of the logarithm of a length.
        output: tokens to generate.
        requests: of one run.
        burstiness: shape of the Gamma distribution of the time between two; 1 is a Poisson process, less is burstier.
        vocabulary: token ids are below.
    """

    lengths: Span
    median: int
    sigma: float
    output: Span
    requests: int
    burstiness: float
    vocabulary: int

    def sessions(self, rate: float, seed: int) -> list[Session]:
        """Return the requests of a run with `rate` of them a second.

        Raises:
            ValueError: if the rate is not positive.
        """
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"the rate is {rate:g} requests/s, expected a positive number")
        rng, at, found = random.Random(f"mixture-{seed}-{rate:g}"), 0.0, []  # noqa: S311
        for _ in range(self.requests):
            at += rng.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
            length = round(rng.lognormvariate(math.log(self.median), self.sigma))
            length = min(max(length, self.lengths.low), self.lengths.high)
            found.append(Session((), (Turn(at, tokens(rng, length, self.vocabulary), self.output.draw(rng)),)))
        return found


@dataclass(frozen=True)
class Agentic:
    """Agents at work: each waits for a tool, and goes on with what it has read, written and got from the tool.

    Attributes:
        prefix: tokens in front of the first turn.
        turns: of a session.
        new: tokens that a tool gives.
        output: tokens to generate in a turn.
        think: mean seconds between two turns, of an exponential distribution.
        vocabulary: token ids are below.
    """

    prefix: int
    turns: int
    new: Span
    output: Span
    think: float
    vocabulary: int

    def sessions(self, count: float, seed: int) -> list[Session]:
        """Return sessions that are at work at the same time.

        Raises:
            ValueError: if their number is no positive whole number.
        """
        if count < 1 or count != int(count):
            raise ValueError(f"found {count:g} sessions, expected a positive whole number")
        return [self._session(number, count, seed) for number in range(int(count))]

    def _session(self, number: int, count: float, seed: int) -> Session:
        rng = random.Random(f"agentic-{seed}-{count:g}-{number}")  # noqa: S311
        turns = [
            Turn(
                rng.expovariate(1 / self.think) if self.think else 0.0,
                tokens(rng, self.new.draw(rng), self.vocabulary),
                self.output.draw(rng),
            )
            for _ in range(self.turns)
        ]
        return Session(self.start(number), tuple(turns))

    def start(self, number: int) -> tuple[int, ...]:
        """Return the prefix of a session, which is the same in all runs."""
        return tokens(random.Random(f"prefix-{number}"), self.prefix, self.vocabulary)  # noqa: S311


def tokens(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    """Return random token ids."""
    return tuple(rng.choices(range(10, vocabulary), k=count))
