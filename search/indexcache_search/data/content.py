"""Digests of sources, by which a run recognises its data."""

from __future__ import annotations

import hashlib
from pathlib import Path

from indexcache_search import demo
from indexcache_search.errors import DataError
from sglang_indexcache.files.atomic import reason


def content_digest(source: str) -> str | None:
    """Return the sha256 of all bytes and file names of a source; `None` for a hub id.

    Args:
        source: file, folder, `demo:NAME` or hub id.

    Raises:
        DataError: if it can't be read.
    """
    path = demo.data_file(source.removeprefix("demo:")) if source.startswith("demo:") else Path(source)
    try:
        if not path.exists():
            return None
        if path.is_file():
            return _file(path)
        digest = hashlib.sha256()
        for inner in sorted(path.rglob("*")):
            if inner.is_file():
                digest.update(f"{inner.relative_to(path).as_posix()!r} {_file(inner)}\n".encode())
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: {reason(error)}") from None
    return digest.hexdigest()


def _file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
