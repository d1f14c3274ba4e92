"""Options that only some modes of a command read: asked for in another one, they are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from indexcache_search.errors import SearchError

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Need:
    """What an option needs beside it, so that something reads it.

    Attributes:
        words: for people, behind "needs".
        met: whether the values of all options have it.
    """

    words: str
    met: Callable[[Values], bool]


Needs = Mapping[str, tuple[Need, ...]]
"""What each option of a command needs; of every one, so that a new option is thought about."""


def refuse_unread(context: typer.Context, needs: Needs) -> None:
    """Refuse an option that somebody gave, and that nothing would read.

    Raises:
        SearchError: naming it, and what it needs.
    """
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        for need in needs[name]:
            if not need.met(context.params):
                flag = "--" + ("no-" if value is False else "") + name.strip("_").replace("_", "-")
                shown = f"{context.params['config']}: {name}" if source.name == "DEFAULT_MAP" else flag
                raise SearchError(f"{shown} needs {need.words}")
