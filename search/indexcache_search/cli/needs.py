"""Options that are read beside others only: asked for without those, they are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from indexcache_search.errors import SearchError


@dataclass(frozen=True)
class Need:
    """What an option needs beside it, so that something reads it.

    Attributes:
        words: for people, behind "needs".
        met: whether the values of all options have it.
    """

    words: str
    met: Callable[[Mapping[str, Any]], bool]


Needs = Mapping[str, tuple[Need, ...]]
"""What options of a command need; those that are read in any case are not in it."""


def refuse_unread(context: typer.Context, needs: Needs) -> None:
    """Refuse an option that somebody gave, and that nothing would read.

    Raises:
        SearchError: naming it, and what it needs.
    """
    for name, its_needs in needs.items():
        value, source = context.params[name], context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        flag = "--" + ("no-" if value is False else "") + name.replace("_", "-")
        shown = f"{context.params['config']}: {name}" if source.name == "DEFAULT_MAP" else flag
        for need in its_needs:
            if not need.met(context.params):
                raise SearchError(f"{shown} needs {need.words}")
