"""Speed beside loss: an extension times prompts on servers, and estimates patterns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import TimesPrompts
from indexcache_search.evaluation.journal import Journal
from indexcache_search.results.schema import SpeedRow
from indexcache_search.results.variant import Variant
from sglang_indexcache import ModelLayers
from sglang_indexcache.http.address import Address
from sglang_indexcache.io.extensions import extensions

Estimates = Callable[[Sequence[Variant]], list[SpeedRow]]
"""A function that estimates the speeds of lines, the baseline first."""


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """Prompts whose speed is compared: measured on servers, estimated for patterns.

    Attributes:
        contexts: tokens of a prompt.
        output_tokens: tokens to generate behind each, on servers.
        turns: rounds that count there; one before them warms up.
        concurrency: requests at once, beside one at a time.
        prices: name or file of the latency table of estimates; the model's by default.
    """

    contexts: tuple[int, ...]
    output_tokens: int = 64
    turns: int = 5
    concurrency: int = 1
    prices: str | None = None

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Tokens of a prompt, and requests at once, of what servers are given to do, one after the other."""
        return [(context, number) for context in self.contexts for number in dict.fromkeys((1, self.concurrency))]


class Speeds(ABC):
    """What finds speeds, registered as `prompts` by an entry point of the group `indexcache.speeds`."""

    @abstractmethod
    def check(self, addresses: Sequence[Address], options: SpeedOptions) -> None:
        """Raise an `IndexCacheError` if a server does not take the longest prompt, or does not answer."""

    @abstractmethod
    def timed(
        self,
        addresses: Sequence[Address],
        lines: Sequence[Variant],
        options: SpeedOptions,
        *,
        pool: NDArray[np.int32],
        done: Callable[[], None],
    ) -> Iterator[list[SpeedRow]]:
        """Yield the rows of servers, of one load after the other, each as it is done.

        Args:
            addresses: the servers, the baseline first.
            lines: their lines in the comparison.
            options: what they are given to do.
            pool: tokens that prompts are made of, `[n]`.
            done: called after each load.

        Raises:
            IndexCacheError: if a server does not answer, or not as requested.
        """

    @abstractmethod
    def estimates(self, model: ModelLayers, options: SpeedOptions, notice: Callable[[str], None]) -> Estimates:
        """Return what estimates patterns of a model; `notice` hears that the table is of another shape.

        Raises:
            SearchError: if there is no table, its shape is another and it was not named, or it has no such prompts.
        """

    @abstractmethod
    def searched(
        self, engine: TimesPrompts, lines: Sequence[Variant], data: TokenSet, journal: Journal
    ) -> list[SpeedRow]:
        """Return the rows of `lines`, the baseline first, from the journal if they are there.

        Raises:
            SearchError: if a server refuses, or none came back.
        """


def speeds() -> Speeds | None:
    """Return what finds speeds; `None` if no extension does.

    Raises:
        ExtensionError: if an extension can't be loaded.
    """
    found: Speeds | None = extensions("speeds", Speeds).get("prompts")
    return found
