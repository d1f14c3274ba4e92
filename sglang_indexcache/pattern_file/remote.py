"""Pattern files that are not on this machine: extensions know where."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from sglang_indexcache.io.extensions import extensions

SUFFIXES = (".yaml", ".yml")
_REASONS = {  # by class of the client's error, special before general
    "GatedRepoError": "the repository is gated; expected a token that has access (hf auth login, or HF_TOKEN)",
    "RepositoryNotFoundError": "no such repository, or a private one without a token",
    "RevisionNotFoundError": "no such revision there",
    "LocalEntryNotFoundError": "it is not in the cache, and the hub was not reached (HF_HUB_OFFLINE, or no network)",
    "EntryNotFoundError": "no such file there",
}


class RemoteFile(ABC):
    """A pattern file that an extension of the group `sources` can get; `str` gives its name."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """Read a name; return `None` for anything that may be local.

        Raises:
            PatternFileError: for a name that nobody means as a file here.
        """

    @abstractmethod
    def download(self) -> tuple[Self, Path]:
        """Return this file, pinned so that no other content has its name, and a copy on this machine.

        Raises:
            PatternFileError: if it can't be had, or is too large.
        """


def remote_file(text: str) -> RemoteFile | None:
    """Return the file that `text` names for an extension, `None` for anything that may be local."""
    found = (kind.parse(text) for kind in extensions("sources", RemoteFile).values())
    return next((file for file in found if file is not None), None)


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Leave out what the hub's client says of each try; why it failed is said once, by who asked."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def why(error: Exception) -> str:
    """Say why the hub's client failed, in its own words where they are not about a cause that is known."""
    names = [item.__name__ for item in type(error).__mro__]
    known = next((words for name, words in _REASONS.items() if name in names), None)
    return known or f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
