"""The entry point of the group `indexcache.speeds`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import TimesPrompts
from indexcache_search.eval.speeds import Estimates, SpeedOptions, Speeds
from indexcache_search.evaluation.journal import Journal
from indexcache_search.results.schema import SpeedRow
from indexcache_search.results.variant import Variant
from indexcache_speed import servers
from indexcache_speed.estimate import estimated, prices_at
from indexcache_speed.prompt_times import measured_times
from indexcache_speed.timed_request import send
from indexcache_speed.turns import Load, Timed, measured
from sglang_indexcache import ModelLayers
from sglang_indexcache.http.address import Address


class Prompts(Speeds):
    """Times prompts, or adds up the times of layers."""

    def check(self, addresses: Sequence[Address], options: SpeedOptions) -> None:
        """See `servers.check`."""
        servers.check(addresses, _loads(options))

    def timed(
        self,
        addresses: Sequence[Address],
        lines: Sequence[Variant],
        options: SpeedOptions,
        *,
        pool: NDArray[np.int32],
        done: Callable[[], None],
    ) -> Iterator[list[SpeedRow]]:
        """See `Speeds.timed`."""
        asked = zip(lines, addresses, strict=True)
        items = [Timed(line, partial(send, address.without("/v1"))) for line, address in asked]
        for load in _loads(options):
            yield measured(items, load, pool, servers.BASIS)
            done()

    def estimates(self, model: ModelLayers, options: SpeedOptions, notice: Callable[[str], None]) -> Estimates:
        """See `Speeds.estimates`."""
        prices = prices_at(model, options.contexts, options.prices)
        for unlike in dict.fromkeys(each.unlike for each in prices if each.unlike):
            notice(f"--speed: reckoned as {prices[0].table}, which this model is not: {unlike}")
        return lambda lines: estimated(lines, prices)

    def searched(
        self, engine: TimesPrompts, lines: Sequence[Variant], data: TokenSet, journal: Journal
    ) -> list[SpeedRow]:
        """See `measured_times`."""
        return measured_times(engine, lines, data, journal)


def _loads(options: SpeedOptions) -> list[Load]:
    return [
        Load(context=context, concurrency=number, output_tokens=options.output_tokens, turns=options.turns)
        for context, number in options.loads
    ]


PROMPTS = Prompts()
