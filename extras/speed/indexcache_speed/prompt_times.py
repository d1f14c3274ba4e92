"""Times of prompts with the patterns that a search found, journalled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import TimesPrompts
from indexcache_search.engines.calibration_client import CalibrationServer, ServerLostError
from indexcache_search.evaluation.journal import Journal
from indexcache_search.results.schema import SpeedRow
from indexcache_search.results.variant import Variant
from indexcache_speed.timed_request import Burst, send
from indexcache_speed.turns import FEWEST_TURNS, Load, Prompts, Timed, measured
from sglang_indexcache import Pattern
from sglang_indexcache.http.client import NoAnswerError

BASIS = (
    "plain prompts on a calibration server: without CUDA graphs, and tensor-parallel ranks share one rank's selection"
)


def measured_times(engine: TimesPrompts, lines: Sequence[Variant], data: TokenSet, journal: Journal) -> list[SpeedRow]:
    """Return the rows of `lines`, the baseline first, from the journal if they are there.

    Raises:
        SearchError: as `prompt_times`.
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

    They ask for one token and nothing else. Evaluations are not timed for that: they compute losses, and keep states of
    the baseline. If the server is lost meanwhile, all begins anew on another one.

    Raises:
        SearchError: if a server refuses, or none came back.
    """
    load = Load(context=data.seq_len, output_tokens=1, turns=FEWEST_TURNS)

    def on(server: CalibrationServer) -> list[SpeedRow]:
        items = [Timed(line, partial(_send, server, line.letters)) for line in lines if line.letters is not None]
        return measured(items, load, data.tokens.ravel(), BASIS)

    return engine.anywhere(on)


def _send(server: CalibrationServer, pattern: Pattern, prompts: Prompts, output_tokens: int) -> Burst:
    """Send plain prompts under a pattern, on which nothing is measured."""
    server.switch(pattern)
    try:
        burst = send(server.address, prompts, output_tokens, key=server.key, dp_rank=server.dp_rank)
    except NoAnswerError as error:
        raise ServerLostError(str(error)) from None
    server.undisturbed()
    return burst
