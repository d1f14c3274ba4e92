"""Additions of extensions: entry points of the groups `indexcache.families`, `indexcache.strategies` and so on.

An extension that can't be loaded is an error, so that nobody takes its absence for a choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from sglang_indexcache.io.errors import IndexCacheError


class ExtensionError(IndexCacheError):
    """An extension that can't be loaded, that was made for another version, or that claims what another one has."""


@cache
def extensions(group: str, kind: type) -> Mapping[str, Any]:
    """Load the extensions of a group; return them by the names of their entry points, sorted.

    Args:
        group: behind `indexcache.`, for instance `families`.
        kind: what each must be: an instance, or a class, of this one.

    Raises:
        ExtensionError: if one can't be loaded or is something else, or two have one name.
    """
    found: dict[str, Any] = {}
    for entry in sorted(entry_points(group=f"indexcache.{group}"), key=lambda item: (item.name, item.value)):
        if entry.name in found:
            raise ExtensionError(f"{_named(entry)}: the name {entry.name} is taken twice, expected it once")
        found[entry.name] = _loaded(entry, kind)
    return MappingProxyType(found)


def first_made(group: str, kind: type) -> Any:
    """Make what the first extension of a group is a class of; return `None` if the group has none.

    Raises:
        ExtensionError: as `extensions`.
    """
    return next((each() for each in extensions(group, kind).values()), None)


def _loaded(entry: EntryPoint, kind: type) -> Any:
    try:
        found = entry.load()
    except Exception as error:  # importing it may raise anything
        why = str(error) if isinstance(error, IndexCacheError) else f"{type(error).__name__}: {error}"
        raise ExtensionError(f"{_named(entry)}: can't be loaded: {why}") from error
    is_class = isinstance(found, type)
    if not (issubclass(found, kind) if is_class else isinstance(found, kind)):
        what = found.__name__ if is_class else type(found).__name__
        raise ExtensionError(f"{_named(entry)}: is {what}, expected {kind.__name__} of this version")
    if is_class and (lacking := sorted(getattr(found, "__abstractmethods__", ()))):
        raise ExtensionError(f"{_named(entry)}: lacks {', '.join(lacking)}, expected {kind.__name__} of this version")
    return found


def _named(entry: EntryPoint) -> str:
    source = "" if entry.dist is None else f" ({entry.dist.name} {entry.dist.version})"
    return f"extension {entry.name} = {entry.value} of {entry.group}{source}"
