"""An attention module of a loaded model, and how often its indexer should run."""

from __future__ import annotations

import sys
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


def makes_graphs() -> bool:
    """Return whether SGLang makes CUDA graphs now: it runs each pass before it captures it."""
    asks = (getattr(sys.modules.get(name), "get_is_capture_mode", None) for name in _WITH_CAPTURE_MODE)
    return any(ask() for ask in asks if ask is not None)


_WITH_CAPTURE_MODE = (
    "sglang.srt.model_executor.runner_utils.capture_mode",  # read in 0.5.15, 0.5.17 and 0.5.23
    "sglang.srt.model_executor.cuda_graph_runner",  # in 0.5.11 and 0.5.13
)
