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
        selects: the name of the indexer's method that selects for prompts, which SGLang calls with its `ForwardBatch`
            also where a graph of prompts is replayed, and no module is called; `None` where there is no such method.
        direct: the name of the indexer's method that SGLang may call in place of the module, as in context-parallel
            prompts on GPUs from 0.5.23 on; `None` where it never does.
        in_graphs: whether graphs of prompts hold all of what the indexer does, so that a replay calls nothing of it.
    """

    site: int
    module: Any
    indexer: Any
    allowed: Callable[[Mapping[str, Any]], tuple[int, ...]]
    selects: str | None = None
    direct: str | None = None
    in_graphs: bool = False


class Observed:
    """A method of one object that is observed for a while: it stands on the object, and calls what stood there.

    Args:
        owner: the object.
        name: name of the method.
        note: called with the method's arguments before it.
    """

    def __init__(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        self._owner, self._name, self._note = owner, name, note
        self.before = vars(owner).get(name)
        self._method = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        self._note(*args, **kwargs)
        return self._method(*args, **kwargs)

    def remove(self) -> None:
        """Put back what stood there, unless something else took the place since."""
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)
            if self.before is not None:
                setattr(self._owner, self._name, self.before)


def unobserved(placed: Any) -> Any:
    """Return what stands on an object below an `Observed`; `None` for nothing."""
    while isinstance(placed, Observed):
        placed = placed.before
    return placed


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
