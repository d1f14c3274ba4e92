"""The output folder of a search: the names of its files, and what stands for its pattern file.

A search leaves a mark that lists the sha256 of each file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from sglang_indexcache.io.extensions import extensions

MARK = "indexcache-run.json"
SEARCH = "indexcache-search"
PATTERN, METRICS, REPORT, CARD = "pattern.yaml", "metrics.json", "report.html", "README.md"
FILES = (PATTERN, METRICS, REPORT, CARD)
PAGES = (REPORT, CARD)  # both are missing where no extension wrote them


class ResultFolder(ABC):
    """The folder of a search, as an extension of the group `folders` finds it by a name.

    Attributes:
        name: as it was written; of a repository on the hub, with its commit.
    """

    name: str

    @classmethod
    @abstractmethod
    def find(cls, text: str) -> Self | None:
        """Return the folder that `text` names, `None` if it names none.

        Raises:
            PatternFileError: if a file can't be had.
        """

    @abstractmethod
    def problems(self) -> list[str]:
        """Return a line for each reason why its files are not those of one search; an empty list if they are."""

    @abstractmethod
    def as_text(self, problems: Sequence[str]) -> str:
        """Return the result for people."""

    @property
    def pattern(self) -> str:
        """Name of its pattern file."""
        return f"{self.name}/{PATTERN}"


def result_folder(text: str) -> ResultFolder | None:
    """Return the folder that `text` names for an extension, `None` if it names none; see `ResultFolder.find`."""
    found = (kind.find(text) for kind in extensions("folders", ResultFolder).values())
    return next((folder for folder in found if folder is not None), None)
