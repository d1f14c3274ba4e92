"""What stands in for a method of one of SGLang's indexers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor

from sglang_indexcache.hooks import refusing_around


class Method(ABC):
    """In the place of a method that selects; what goes wrong in ours ends the process.

    Args:
        indexer: SGLang's.
        name: of the method.
    """

    def __init__(self, indexer: Any, name: str) -> None:
        self.indexer = indexer
        self._sglangs = MethodType(getattr(type(indexer), name), indexer)
        self._signature, self._guarded = inspect.signature(self._sglangs), refusing_around(self._called)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """As SGLang's method."""
        selected: Tensor = self._guarded(self._sglangs, *args, **kwargs)
        return selected

    def _called(self, sglangs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return self.select(sglangs, self._signature.bind(*args, **kwargs).arguments)

    @abstractmethod
    def select(self, sglangs: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        """What each row attends to, `[rows, index_topk]`, int32, in SGLang's index space, -1 for none.

        Args:
            sglangs: SGLang's method, which takes all that is given by name.
            given: by name. `q_fp8`: index queries `[rows, heads, dim]`, perhaps with rows behind the last token;
                `weights`: of the heads, with all scales, `[rows, heads, 1]`; `metadata`: a `DSAIndexerMetadata`;
                `forward_batch`: requests and their lengths; in prompts perhaps `topk_result`, to be filled.
        """
