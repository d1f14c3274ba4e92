"""Times of prompts with the patterns that a search found, journalled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Send, TimesPrompts
from indexcache_search.eval.speed.turns import FEWEST_TURNS, Load, Timed, measured
from indexcache_search.evaluation.journal import Journal
from indexcache_search.results.schema import SpeedRow
from indexcache_search.results.variant import Variant

BASIS = (
    "plain prompts on a calibration server: without CUDA graphs, and tensor-parallel ranks share one rank's selection"
)


def measured_times(engine: TimesPrompts, lines: Sequence[Variant], data: TokenSet, journal: Journal) -> list[SpeedRow]:
    """Return the rows of `lines`, the baseline first, from the journal if they are there.

    Raises:
        SearchError: as `time_prompts`.
    """
    plans = [[line.name, str(line.retention), None if line.pattern is None else line.pattern.key] for line in lines]
    name = json.dumps(plans)
    recorded = journal.speed(name)
    if recorded is None:
        recorded = [row.model_dump(mode="json") for row in prompt_times(engine, lines, data)]
        journal.add_speed(name, recorded)
    return [SpeedRow.model_validate(row) for row in recorded]


def prompt_times(engine: TimesPrompts, lines: Sequence[Variant], data: TokenSet) -> list[SpeedRow]:
    """Time prompts as long as the sequences of `data`, made of its tokens, with each pattern in turn on one server.

    They ask for one token and nothing else.

    Raises:
        SearchError: as `time_prompts`.
    """
    load = Load(context=data.seq_len, output_tokens=1, turns=FEWEST_TURNS)

    def timed(send: Send) -> list[SpeedRow]:
        items = [Timed(line, partial(send, line.letters)) for line in lines if line.letters is not None]
        return measured(items, load, data.tokens.ravel(), BASIS)

    return engine.time_prompts(timed)
