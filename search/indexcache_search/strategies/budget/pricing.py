"""Choose a model's latency table: one of its shape, or one that was named although the model has another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from indexcache_search import demo
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.identity import Place
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.strategies.budget.table import LatencyTable, known
from sglang_indexcache import ModelLayers
from sglang_indexcache.checkpoint.checkpoint import read_config
from sglang_indexcache.families import describe

BY_ARCHITECTURE = {"DeepseekV32ForCausalLM": "deepseek-v3.2-tp8", "GlmMoeDsaForCausalLM": "glm-5-tp8"}
"""Tables of the shapes that the best-known checkpoints have on 8 GPUs."""
ANYWHERE = Place()


def table_of(model: ModelLayers, named: str | None = None) -> LatencyTable | None:
    """Return the latency table of a model; `None` if its architecture has none.

    Args:
        model: description of the model.
        named: name or file of a table, which is taken whatever the model's shape is. Without it the demo's model has
            the one of the models that it stands in for, and others that of the whole model, or of their architecture.

    Raises:
        SearchError: if there is no table of that name, or the architecture's is of another shape than the model.
    """
    if named is not None:
        return LatencyTable.load(named)
    if model.config_sha256 == _demo_sha256():
        return LatencyTable.load(demo.TIMED_AS)
    if whole := whole_tables(model):
        return whole[0]
    name = BY_ARCHITECTURE.get(model.architecture)
    if name is None:
        return None
    table = LatencyTable.load(name)
    if unlike := table.unlike(model):
        raise SearchError(
            f"the times of {table} are not those of {model.name}, which has {unlike}; expected prices=FILE, a table of"
            f" its shape, or prices={name} to reckon by that one all the same"
        )
    return table


def whole_tables(model: ModelLayers) -> list[LatencyTable]:
    """Return the package's tables of a whole model of this shape and with as many layers, by name."""
    tables = map(LatencyTable.load, known())
    return [
        table for table in tables if table.whole and table.whole.layers == len(model.layers) and not table.unlike(model)
    ]


def priced(model: ModelLayers, table: LatencyTable, context: int, place: Place = ANYWHERE) -> Prices:
    """Return a table's latencies for prompts of `context` tokens.

    Their words say if the model is of another shape, or runs at another place.

    Raises:
        SearchError: if so many were not measured.
    """
    prices, unlike, elsewhere = table.at(context), table.unlike(model), table.elsewhere(place)
    words = f"{prices.words}, which this model is not ({unlike})" if unlike else prices.words
    return replace(prices, words=f"{words}, while its servers have {elsewhere}" if elsewhere else words, unlike=unlike)


def column(
    model: ModelLayers, notice: Callable[[str], None], named: str | None = None, place: Place = ANYWHERE
) -> Prices | None:
    """Return latencies of the longest prompts for a column of speeds; `None` without a table of the model's shape.

    `notice` hears why there are none, where its architecture has a table. `named`: see `table_of`.
    """
    try:
        table = table_of(model, named)
    except SearchError as error:
        notice(f"no speeds are estimated: {error}")
        return None
    return None if table is None else priced(model, table, table.contexts[-1], place)


@cache
def _demo_sha256() -> str:
    return describe(*read_config(str(demo.MODEL))).config_sha256
