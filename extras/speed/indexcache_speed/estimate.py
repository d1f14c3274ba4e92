"""Estimates of speed where nothing was timed: by the latency table of a model's shape."""

from __future__ import annotations

from collections.abc import Sequence

from indexcache_search.errors import SearchError
from indexcache_search.results.schema import GainResult, SpeedRow, Spread
from indexcache_search.results.variant import BASELINE, Variant
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.strategies.budget.pricing import priced, table_of
from sglang_indexcache import ModelLayers, Pattern


def prices_at(model: ModelLayers, contexts: Sequence[int], table: str | None) -> list[Prices]:
    """Return the latencies of layers in prompts of each length.

    Args:
        model: without a name its architecture's table is taken.
        contexts: tokens of the prompts.
        table: name or file of a table.

    Raises:
        SearchError: if there is no table, its shape is another and it was not named, or it has no such prompts.
    """
    found = table_of(model, table)
    if found is None:
        raise SearchError(
            f"--speed: no latency table is known for {model.architecture}, expected prices=, a table or a file,"
            " or --endpoint with servers"
        )
    return [priced(model, found, context) for context in contexts]


def estimated(lines: Sequence[Variant], prices: Sequence[Prices]) -> list[SpeedRow]:
    """Return the speed of one prompt at a time and of a decoding step behind it: the sum of the layers' times.

    Args:
        lines: the baseline first; those with blocks that the table lacks are left out.
        prices: of one table, one for each length of prompts.
    """
    native = lines[0].letters
    assert native is not None
    return [
        _row(line, line.letters, native, price)
        for price in prices
        for line in lines
        if line.letters is not None and set(line.letters.queries.values()) <= set(price.full)
    ]


def _row(line: Variant, pattern: Pattern, native: Pattern, prices: Prices) -> SpeedRow:
    gain = GainResult(
        first_token=Spread(median=round(1 / prices.prompt_share(pattern, native), 4)),
        token=Spread(median=round(1 / prices.decode_share(pattern, native), 4)),
    )
    return SpeedRow(
        name=line.name,
        retention=None if line.retention is None else str(line.retention),
        context=prices.context,
        concurrency=1,
        output_tokens=None,
        turns=None,
        first_token_ms=Spread(median=round(prices.prompt_ms(pattern), 3)),
        token_ms=Spread(median=round(prices.decode_ms(pattern), 3)),
        gain=None if line.kind == BASELINE else gain,
        source="estimated",
        basis=f"times of {len(pattern)} layers of {prices.words}",
    )
