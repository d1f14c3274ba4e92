"""What users get from a server under load: requests that met a limit of TTFT and one of TPOT, and their percentiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.bench.serving.replay import Outcome

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Unloaded:
    """Times of a server that does nothing else, by the new tokens of a prompt.

    Attributes:
        new: tokens, in rising order.
        first: seconds to the first token.
        token: seconds of each later one.
    """

    new: tuple[int, ...]
    first: tuple[float, ...]
    token: tuple[float, ...]

    def at(self, new: int) -> tuple[float, float]:
        """Return TTFT and TPOT for a prompt of so many new tokens, between the ones that were timed."""
        first, token = (float(np.interp(new, self.new, values)) for values in (self.first, self.token))
        return first, token


@dataclass(frozen=True)
class Bound:
    """A limit: seconds, or a multiple of what a server takes that does nothing else."""

    seconds: float | None
    multiple: float | None

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Read `3x`, `2s` or `50ms`.

        Raises:
            ValueError: if it is none of them, or not positive.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(x|s|ms)", text)
        if found is None or float(found[1]) <= 0:
            raise ValueError(f"found {text!r}, expected a positive 3x, 2s or 50ms")
        value = float(found[1])
        return cls(None, value) if found[2] == "x" else cls(value / (1000 if found[2] == "ms" else 1), None)

    def __str__(self) -> str:
        return f"{self.multiple:g}x" if self.seconds is None else f"{self.seconds:g} s"

    def of(self, unloaded: float | None) -> float:
        """Return the limit in seconds."""
        if self.seconds is not None:
            return self.seconds
        assert self.multiple is not None and unloaded is not None
        return self.multiple * unloaded


@dataclass(frozen=True)
class Limits:
    """Limits of TTFT and TPOT; for multiples `unloaded` has the times of the server that is the measure."""

    first: Bound
    token: Bound
    unloaded: Unloaded | None

    def met(self, outcome: Outcome) -> tuple[bool, bool]:
        """Return whether a request met the limit of TTFT, and that of TPOT."""
        if outcome.error is not None:
            return False, False
        first, token = (None, None) if self.unloaded is None else self.unloaded.at(outcome.new)
        return outcome.first <= self.first.of(first), outcome.token <= self.token.of(token)


def summary(rounds: Sequence[tuple[Sequence[Outcome], float]], limits: Limits) -> dict[str, Any]:
    """Sum up the rounds of one cell.

    Args:
        rounds: outcomes of each, and the seconds that it took.
        limits: that make a request a good one.

    Returns:
        Requests a second and shares of all requests, failed ones among them; percentiles of those that did not fail, in
        milliseconds, `None` if all did; tokens a second; the share of requests' time before the first token.
    """
    outcomes, seconds = [item for found, _ in rounds for item in found], sum(took for _, took in rounds)
    fine = [item for item in outcomes if item.error is None]
    met = [limits.met(item) for item in outcomes]
    every = [sum(all(limits.met(item)) for item in found) / took for found, took in rounds]
    latency = sum(item.latency for item in fine)
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(fine),
        "errors": sorted({item.error for item in outcomes if item.error is not None})[:5],
        "seconds": seconds,
        "goodput": sum(map(all, met)) / seconds,
        "goodput_rounds": every,
        "met": sum(map(all, met)) / len(outcomes),
        "met_ttft": sum(first for first, _ in met) / len(outcomes),
        "met_tpot": sum(token for _, token in met) / len(outcomes),
        "ttft_ms": _percentiles([item.first for item in fine]),
        "tpot_ms": _percentiles([item.token for item in fine if item.later]),
        "requests_per_s": len(fine) / seconds,
        "output_tokens_per_s": sum(item.output for item in fine) / seconds,
        "prompt_tokens_per_s": sum(item.prompt for item in fine) / seconds,
        "cached": sum(item.cached for item in fine) / max(1, sum(item.prompt for item in fine)),
        "at_once": latency / seconds,
        "before_first": sum(item.first for item in fine) / latency if latency else None,
    }


def _percentiles(values: Sequence[float]) -> list[float] | None:
    return [1e3 * float(np.percentile(values, at)) for at in PERCENTILES] if values else None
