"""Times of prompts with the patterns that a search found, journalled."""

from __future__ import annotations

import json
from collections.abc import Sequence

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Engine
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.evaluation.journal import Journal
from indexcache_search.results.held_out import SpeedRow
from indexcache_search.results.variant import Variant


class PromptTimes:
    """Times that calibration servers measure; transformers says nothing of SGLang's speed.

    Args:
        engine: the search's.
        data: gives the length of the prompts, and the tokens that they are made of.
        journal: remembers.

    Attributes:
        known: whether the engine measures any.
    """

    def __init__(self, engine: Engine, data: TokenSet, journal: Journal) -> None:
        self.known = isinstance(engine, SglangEngine)
        self._engine, self._data, self._journal = engine, data, journal

    def measured(self, lines: Sequence[Variant]) -> list[SpeedRow]:
        """Return the rows of `lines`, the baseline first; none where nothing is known."""
        if not isinstance(self._engine, SglangEngine):
            return []
        plans = [[line.name, str(line.retention), None if line.pattern is None else line.pattern.key] for line in lines]
        name = json.dumps(plans)
        recorded = self._journal.speed(name)
        if recorded is None:
            recorded = [row.model_dump(mode="json") for row in self._engine.prompt_speed(lines, self._data)]
            self._journal.add_speed(name, recorded)
        return [SpeedRow.model_validate(row) for row in recorded]
