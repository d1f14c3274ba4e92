"""An attention module of a loaded model, and how often its indexer should run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CountedAttention:
    """An attention module whose indexer is counted.

    Attributes:
        site: its letter of the pattern, or its number in a draft model.
        module: called once in each pass.
        indexer: a module that is called whenever the layer selects; `None` if it has none.
        allowed: returns from the keyword arguments of a call how often the indexer may run in it.
    """

    site: int
    module: Any
    indexer: Any
    allowed: Callable[[Mapping[str, Any]], tuple[int, ...]]


def exactly(count: int) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Return an `allowed` that is the same in every call."""
    return lambda given: (count,)
