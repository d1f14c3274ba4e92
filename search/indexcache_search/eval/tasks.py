"""Generated tasks, which an extension makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from indexcache_search.errors import DataError
from sglang_indexcache.io.extensions import extensions


@dataclass(frozen=True)
class Sample:
    """One sequence: `tokens` int32, the mask of the answer's tokens, and the answers as text."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    answers: tuple[str, ...]


class Tasks(ABC):
    """What makes samples, registered as `generated` by an entry point of the group `indexcache.tasks`."""

    names: ClassVar[tuple[str, ...]]

    def check(self, names: Sequence[str]) -> None:
        """Check names that somebody asked for.

        Raises:
            DataError: if one is unknown, or stands there twice.
        """
        for name in names:
            if name not in self.names:
                raise DataError(f"there is no {name[:80]!r}, expected {', '.join(self.names)}")
            if names.count(name) > 1:
                raise DataError(f"{name} stands there twice, expected each task once")

    @abstractmethod
    def sample(
        self, task: str, tokenizer: Any, haystack: Sequence[int], seq_len: int, seed: int, *, chat: bool
    ) -> Sample:
        """Make one sample of exactly `seq_len` tokens.

        Args:
            task: one of `names`.
            tokenizer: a transformers tokenizer.
            haystack: tokens of running text, at least `seq_len`.
            seq_len: tokens of the sample.
            seed: random seed of this sample.
            chat: put the tokenizer's chat template around the text.

        Raises:
            DataError: if `seq_len` has no room for the task, or the tokenizer has no chat template.
        """


def generated() -> Tasks:
    """Return what makes samples, which was asked for.

    Raises:
        DataError: if no extension does.
        ExtensionError: if it can't be loaded.
    """
    found: Tasks | None = extensions("tasks", Tasks).get("generated")
    if found is None:
        raise DataError("--tasks needs an extension that is not installed")
    return found
