"""Bytes of a request's keys and values that a decode step reads, by the pattern of a dense model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from indexcache_dense.selection import COMPRESSED_KEYS, ROUNDED_KEYS, STRIDE, Selection
from indexcache_search.strategies.base import BudgetGoal
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE, SHARED
from sglang_indexcache.pattern_file.file import BytesSection

_ROUNDED = (4 + 32 / 128) / 16  # of a key in bfloat16: 4 bits a dimension, and a range for each 128


@dataclass(frozen=True, kw_only=True)
class PageBytes:
    """Bytes that layers read in a step, in those of a token's keys and values in a layer.

    A `D` layer reads all; one that selects for the layers above reads its keys once more, or means of 16 of them, or
    all of them in 4 bits. An `F` layer reads means or rounded keys and the pages that it selects, an `S` layer the
    pages that were selected.

    Attributes:
        selection: of the pattern.
        context: tokens in the cache.
    """

    selection: Selection
    context: int

    def step(self, pattern: Pattern) -> float:
        """Return what a step reads with `pattern`."""
        following = [*pattern.roles[1:], DENSE]
        return sum(
            (self.context if role == DENSE else self._pages)
            + (self._scoring if role != SHARED and (role != DENSE or above == SHARED) else 0.0)
            for role, above in zip(pattern.roles, following, strict=True)
        )

    def share(self, pattern: Pattern) -> float:
        """Return what a step reads relative to layers that are all `D`."""
        return self.step(pattern) / (len(pattern) * self.context)

    @property
    def _pages(self) -> int:
        return min(self.context, self.selection.tokens)

    @property
    def _scoring(self) -> float:
        """Tokens whose keys and values are as many bytes as selecting reads: keys are half of these."""
        if self.context <= self.selection.tokens:
            return 0.0
        read = self.context / 2
        if self.selection.score == COMPRESSED_KEYS:
            read /= STRIDE
        elif self.selection.score == ROUNDED_KEYS:
            read *= _ROUNDED
        return read / (self.selection.steps.every or 1)


@dataclass(frozen=True, kw_only=True)
class PageGoal(BudgetGoal):
    """A pattern of D, F and S of least loss whose decode steps read at most some bytes, relative to all layers D.

    Attributes:
        share: of the bytes of keys and values.
        bytes: what layers read.
    """

    share: float
    bytes: PageBytes

    def fits(self, pattern: Pattern) -> bool:
        """Return whether `pattern` reads at most these bytes."""
        return self.bytes.share(pattern) <= self.share + 1e-9

    def section(self) -> dict[str, Any]:
        """See `BudgetGoal.section`."""
        return {"bytes": BytesSection(share=self.share, context=self.bytes.context)}
