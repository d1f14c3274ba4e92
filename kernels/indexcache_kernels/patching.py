"""The one way to change a running module, and to undo it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Let attributes of objects have other values inside the `with` block, and put back the old ones.

    Values are written on the object itself, so that they hide methods and submodules of the same name, and what hides
    a submodule is not registered as one.

    Args:
        changes: `(object, name, value)`; the same attribute may be named twice, the last value wins.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for item, name, value in changes:
            own = vars(item)
            before.append((own, name, own.get(name, _ABSENT)))
            own[name] = value
        yield
    finally:
        for own, name, value in reversed(before):
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value
