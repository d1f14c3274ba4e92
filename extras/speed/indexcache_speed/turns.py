"""Patterns or servers that are timed in turns, on prompts of the same tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexcache_search.results.schema import GainResult, SpeedRow, Spread
from indexcache_search.results.variant import Variant
from indexcache_speed.timed_request import OPENING, Burst

FEWEST_TURNS = 5
_OUTSIDE = 1 / 16  # probability that an interval misses the true median: both ends of five turns

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Timed:
    """Line of a comparison whose prompts are timed.

    Attributes:
        line: the line of the comparison.
        send: sends prompts at once, and generates so many tokens behind each.
    """

    line: Variant
    send: Callable[[Prompts, int], Burst]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load that a server is given.

    Attributes:
        context: tokens of a prompt.
        concurrency: prompts at once.
        output_tokens: tokens to generate behind each.
        turns: rounds that count; one before them warms up.
    """

    context: int
    concurrency: int = 1
    output_tokens: int
    turns: int


def measured(items: Sequence[Timed], load: Load, pool: NDArray[np.int32], basis: str) -> list[SpeedRow]:
    """Time each of `items`, in turns whose order alternates; the first item is the baseline.

    Prompts are random tokens of `pool`, new in each run, and the same for all items but for their `OPENING`, so that
    nothing is in a prefix cache, even of a server that stands there twice.

    Args:
        items: what is timed.
        load: what each is given to do.
        pool: tokens to draw from, `[n]`.
        basis: see `SpeedRow`.

    Raises:
        IndexCacheError: if a server does not answer, or not as requested.
    """
    rng, bursts = np.random.default_rng(), [list[Burst]() for _ in items]
    for turn in range(load.turns + 1):
        rest = rng.choice(pool, (load.concurrency, load.context))
        order = range(len(items))
        for number in order if turn % 2 else reversed(order):
            rest[:, :OPENING] = rng.choice(pool, (load.concurrency, OPENING))
            burst = items[number].send(rest.tolist(), load.output_tokens)
            if turn:
                bursts[number].append(burst)
    return [_row(item.line, load, burst, bursts[0], basis) for item, burst in zip(items, bursts, strict=True)]


def _row(line: Variant, load: Load, bursts: Sequence[Burst], baseline: Sequence[Burst], basis: str) -> SpeedRow:
    firsts, tokens, rates = _times(bursts, load)
    before = _times(baseline, load)
    gain = None
    if bursts is not baseline:
        gain = GainResult(
            first_token=_gain(before[0], firsts),
            token=_gain(before[1], tokens) if tokens else None,
            throughput=_gain(rates, before[2]) if tokens else None,
        )
    every = [1e3 * timing.first for burst in bursts for timing in burst.timings]
    percentiles = {str(share): round(float(np.percentile(every, share)), 3) for share in (90, 99)}
    return SpeedRow(
        name=line.name,
        retention=None if line.retention is None else str(line.retention),
        context=load.context,
        concurrency=load.concurrency,
        output_tokens=load.output_tokens,
        turns=load.turns,
        first_token_ms=_spread(firsts),
        token_ms=_spread(tokens) if tokens else None,
        tokens_per_second=_spread(rates) if tokens else None,
        first_token_percentiles=percentiles if load.concurrency > 1 else None,
        gain=gain,
        source="measured",
        basis=basis,
    )


def _times(bursts: Sequence[Burst], load: Load) -> tuple[list[float], list[float], list[float]]:
    """Return of each turn TTFT and TPOT in milliseconds, and the tokens a second.

    The second list is empty if one token alone was generated.
    """
    firsts = [1e3 * statistics.median(timing.first for timing in burst.timings) for burst in bursts]
    each = [[timing.token for timing in burst.timings if timing.token is not None] for burst in bursts]
    tokens = [1e3 * statistics.median(times) for times in each] if all(each) else []
    rates = [load.concurrency * load.output_tokens / burst.seconds for burst in bursts]
    return firsts, tokens, rates


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median=round(statistics.median(values), 3), low=round(min(values), 3), high=round(max(values), 3))


def _gain(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the ratio of two medians, with its interval."""
    ratio = statistics.median(above) / statistics.median(below)
    low, high = interval([one / other for one, other in zip(above, below, strict=True)])
    return Spread(median=round(ratio, 4), low=round(min(low, ratio), 4), high=round(max(high, ratio), 4))


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the true median of paired ratios with a probability of 15/16 at least.

    It is that of the sign test (order statistics), which assumes nothing of how times scatter: of five to eight turns
    it is the smallest and the largest ratio.
    """
    ordered, count, cut, outside = sorted(ratios), len(ratios), 0, 0.0
    while cut < count // 2:
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > _OUTSIDE:
            break
        cut += 1
    place = max(cut - 1, 0)
    return ordered[place], ordered[count - 1 - place]
