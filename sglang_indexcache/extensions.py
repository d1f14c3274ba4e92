"""What other packages add, by entry points: each group has one kind of thing, such as a family or a measure."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from sglang_indexcache.io.errors import IndexCacheError, one_line


@cache
def extensions(group: str) -> dict[str, Any]:
    """Load what is registered in a group of entry points.

    Returns:
        By name, in the order of names.

    Raises:
        IndexCacheError: if one can't be loaded.
    """
    found = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            raise IndexCacheError(
                f"{entry.value} ({entry.name} of {group}) can't be loaded: {one_line(error)}; expected a whole"
                " installation"
            ) from None
    return found
