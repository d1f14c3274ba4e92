"""Indexers of DSA models that score less than every key for every query."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from sglang_indexcache.errors import PatternError

CANDIDATES = "C"
"""The letter of a layer that selects from what the nearest `F` layer before it scored highest."""

QUERIES = (2, 4, 8, 16, 64)  # they divide a page of 64 tokens, so that a cached page depends on its own tokens alone
EXACT_ROWS = 128  # the last queries of a prompt, or of a part of it, that select for themselves all the same
MOST_CANDIDATES = 64
_WORD = re.compile(r"(0|[1-9][0-9]{0,3})([qc])([1-9][0-9]?)")


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """How much less an indexer scores, of an `F` layer in prompts or of a `C` layer everywhere.

    Attributes:
        layer: counted from 0.
        queries: of an `F` layer: so many neighbouring prompt queries share a selection, in blocks that begin at
            multiples of it; one of `QUERIES`. Decoded tokens and the end of a prompt select for themselves.
        candidates: of a `C` layer: it scores the best candidates x index_topk tokens of the nearest `F` layer.

    Raises:
        PatternError: if it is not one of the two, or out of range.
    """

    layer: int
    queries: int = 0
    candidates: int = 0

    def __post_init__(self) -> None:
        if bool(self.queries) == bool(self.candidates):
            raise PatternError(f"layer {self.layer}: expected queries or candidates, found both or none")
        if self.queries and self.queries not in QUERIES:
            raise PatternError(f"{self}: {self.queries} queries, expected one of {', '.join(map(str, QUERIES))}")
        if self.candidates and not 1 <= self.candidates <= MOST_CANDIDATES:
            raise PatternError(f"{self}: {self.candidates} candidates, expected 1 to {MOST_CANDIDATES}")

    def __str__(self) -> str:
        return f"{self.layer}q{self.queries}" if self.queries else f"{self.layer}c{self.candidates}"

    @classmethod
    def parse(cls, word: str) -> Self:
        """Read `6q16` (layer 6 selects for 16 queries at a time) or `3c4` (layer 3 re-scores 4 x index_topk tokens).

        Raises:
            PatternError: if it is something else.
        """
        match = _WORD.fullmatch(word)
        if match is None:
            raise PatternError(f"indexer is {word[:40]!r}, expected a layer with q or c and a number, as 6q16 or 3c4")
        layer, kind, number = int(match[1]), match[2], int(match[3])
        return cls(layer=layer, queries=number) if kind == "q" else cls(layer=layer, candidates=number)
