"""Reading and writing of files: regular ones of bounded size, written as a whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any
from uuid import uuid4

from sglang_indexcache.io.errors import FileError
from sglang_indexcache.io.faults import why_no_json

_MODE = 0o666  # less the umask, as any new file


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """Open a regular file for reading, unbuffered; refuse a pipe or a device before reading it.

    Raises:
        FileError: if it can't be read, also later inside the `with` block, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not hang
    except (OSError, ValueError) as error:  # ValueError: a name that no file has
        raise FileError(f"{path}: {reason(error)}") from None
    try:
        with FileIO(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileError(f"{path}: not a regular file")
            yield file
    except OSError as error:
        raise FileError(f"{path}: {reason(error)}") from None


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        FileError: as `opened`, and if it is larger.
    """
    with opened(path) as file:
        content = BufferedReader(file).read(limit + 1)
    if len(content) > limit:
        raise FileError(f"{path}: is larger than {limit} bytes, expected a smaller file")
    return content


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes.

    Raises:
        FileError: as `read_regular`, and if it is not JSON or not an object.
    """
    data = read_regular(path, limit)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: {why_no_json(data, error)}") from None
    if not isinstance(content, dict):
        raise FileError(f"{path}: found {type(content).__name__}, expected a JSON object")
    return content


def reason(error: BaseException) -> str:
    """Return what went wrong, without the path."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename: a reader sees the old file or the new one, never half of it.

    Each writer has its own name for the unfinished file, and holds a lock on it while it lives. A file without a lock
    was left by a killed writer; the next write of the same file removes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    partial, descriptor = _partial(path)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk has no name for it
            error.filename = str(path)
        raise


def _partial(path: Path) -> tuple[Path, int]:
    """Create a file beside `path`; return it and its descriptor, which holds a lock where the file system has locks."""
    while True:
        partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for a writer that looks at it, no longer
        if os.fstat(descriptor).st_nlink:
            return partial, descriptor
        os.close(descriptor)  # another writer took it for left behind, before it was locked


def _remove_left(path: Path) -> None:
    """Remove the files that killed writers of `path` left."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{32}}\.partial")
    for partial in [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]:
        with suppress(OSError):
            descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    partial.unlink()
            finally:
                os.close(descriptor)
