"""Indexers of DSA models that select for several prompt queries at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from sglang_indexcache.io.errors import PatternError

QUERIES = (2, 4, 8, 16, 64)  # they divide a page of 64 tokens, so that a cached page depends on its own tokens alone
DEFINITION = 2  # of a block; 1, before 0.2.0, gave a block's early queries more of the leader's tokens
EXACT_ROWS = 128  # the last queries of a prompt, or of a part of it, that always select for themselves
CANDIDATES = "C"  # a letter of patterns before 0.2.0, with `3c4` behind them
NO_CANDIDATES = "C layers (candidates) are not supported since version 0.2.0"
_WORD = re.compile(r"(0|[1-9][0-9]{0,3})q([1-9][0-9]?)")
_CANDIDATES_WORD = re.compile(r"[0-9]+c[0-9]+")


@dataclass(frozen=True, kw_only=True)
class IndexerSetting:
    """An `F` layer whose indexer selects for a block of prompt queries at a time.

    Attributes:
        layer: counted from 0.
        queries: how many neighbouring prompt queries share a selection, in blocks that begin at multiples of it; one of
            `QUERIES`. Decoded tokens and the end of a prompt select for themselves.

    Raises:
        PatternError: if `queries` is not among `QUERIES`.
    """

    layer: int
    queries: int

    def __post_init__(self) -> None:
        if self.queries not in QUERIES:
            raise PatternError(f"{self}: {self.queries} queries, expected one of {', '.join(map(str, QUERIES))}")

    def __str__(self) -> str:
        return f"{self.layer}q{self.queries}"

    @classmethod
    def parse(cls, word: str) -> Self:
        """Read `6q16`: layer 6 selects for 16 queries at a time.

        Raises:
            PatternError: if `word` has another form.
        """
        if _CANDIDATES_WORD.fullmatch(word):
            raise PatternError(f"indexer is {word[:40]!r}, but {NO_CANDIDATES}; expected an F layer with q, as 6q16")
        match = _WORD.fullmatch(word)
        if match is None:
            raise PatternError(f"indexer is {word[:40]!r}, expected a layer with q and a number, as 6q16")
        return cls(layer=int(match[1]), queries=int(match[2]))
