"""Options that are read only beside others, and that are refused without these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from indexcache_search.errors import SearchError


@dataclass(frozen=True)
class OptionNeed:
    """A condition under which an option is read.

    Attributes:
        words: names the condition in messages, behind "needs".
        met: returns true if the values of all options fulfil it.
    """

    words: str
    met: Callable[[Mapping[str, Any]], bool]


Needs = Mapping[str, tuple[OptionNeed, ...]]
"""Needs of a command's options. Options that are always read are not in it."""


def refuse_unread(context: typer.Context, needs: Needs) -> None:
    """Refuse an option that the user gave but nothing would read.

    Raises:
        SearchError: naming the option and what it needs.
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
