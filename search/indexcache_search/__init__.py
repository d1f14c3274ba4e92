"""Search, compare and try patterns of layers that share what they attend to.

`search`, `evaluate` and `apply` are the commands for Python; see docs/reference/python.md.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `typing` takes milliseconds to import, in which Python itself would answer Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from indexcache_search.api import apply, evaluate, search
    from indexcache_search.data.templates import RowOptions
    from indexcache_search.engines.settings import RunSettings
    from indexcache_search.eval.speeds import SpeedOptions
    from indexcache_search.results.schema import ComparisonResult, SearchResult
    from indexcache_search.searching.settings import Budget

__all__ = [
    "Budget",
    "ComparisonResult",
    "RowOptions",
    "RunSettings",
    "SearchResult",
    "SpeedOptions",
    "apply",
    "evaluate",
    "search",
]

_HOMES = {
    "Budget": "searching.settings",
    "ComparisonResult": "results.schema",
    "RowOptions": "data.templates",
    "RunSettings": "engines.settings",
    "SearchResult": "results.schema",
    "SpeedOptions": "eval.speeds",
    "apply": "api",
    "evaluate": "api",
    "search": "api",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: the commands import this package before they answer Ctrl-C."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
