"""Plans that an engine can evaluate: patterns of letters, or other objects with a key of one word."""

from __future__ import annotations

from typing import Protocol

from sglang_indexcache import Pattern


class Plan(Protocol):
    """Object that an engine runs. Equal plans have equal keys; tables and files show its `str`."""

    @property
    def key(self) -> str:
        """The whole plan in one word without spaces."""
        ...

    def __str__(self) -> str: ...


def order(plan: Plan) -> tuple[str, str]:
    """Return a sort key that groups plans whose first layers run alike."""
    return (str(plan.selection), plan.letters) if isinstance(plan, Pattern) else ("", plan.key)
