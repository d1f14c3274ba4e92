"""What an engine can evaluate: patterns of letters, or something else that says all of itself in one word."""

from __future__ import annotations

from typing import Protocol

from sglang_indexcache import Pattern


class Plan(Protocol):
    """Something that an engine runs; equal plans have equal keys, and `str` of one is what tables and files show."""

    @property
    def key(self) -> str:
        """All that the plan says, in one word without spaces."""
        ...

    def __str__(self) -> str: ...


def order(plan: Plan) -> tuple[str, str]:
    """Sort key: plans in this order follow those whose first layers run alike."""
    return (str(plan.selection), plan.letters) if isinstance(plan, Pattern) else ("", plan.key)
