"""Plans that an engine can evaluate: patterns of letters, or other objects with a key of one word."""

from __future__ import annotations

from operator import attrgetter
from typing import Protocol

from sglang_indexcache import Pattern


class Plan(Protocol):
    """Object that an engine runs. Equal plans have equal keys; tables and files show its `str`."""

    @property
    def key(self) -> str:
        """The whole plan in one word without spaces."""
        ...

    @property
    def order(self) -> tuple[str, str]:
        """A sort key that groups plans whose first layers run alike."""
        ...

    @property
    def pattern(self) -> Pattern | None:
        """The pattern of letters that it is; `None` for a plan of another kind, without layers F or a time."""
        ...

    def __str__(self) -> str: ...


order = attrgetter("order")
