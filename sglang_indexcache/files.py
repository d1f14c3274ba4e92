"""Files as this project reads and writes them: regular ones of bounded size, written as a whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import FileError

_PARTIAL = 0o666  # less the umask, as any new file


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; a pipe or a device is refused before it is read.

    Raises:
        FileError: if it can't be read, is something else than a file, or larger.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not hang
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileError(f"{path}: not a regular file")
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path}: {reason(error)}") from None
    if len(content) > limit:
        raise FileError(f"{path}: is larger than {limit} bytes, expected a smaller file")
    return content


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """A JSON object of at most `limit` bytes.

    Raises:
        FileError: as `read_regular`, and if it is not JSON or not an object.
    """
    try:
        content = json.loads(read_regular(path, limit).decode())
    except FileError:
        raise
    except (ValueError, RecursionError):
        raise FileError(f"{path}: not JSON") from None
    if not isinstance(content, dict):
        raise FileError(f"{path}: found {type(content).__name__}, expected a JSON object")
    return content


def reason(error: BaseException) -> str:
    """What went wrong, without the path."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename: a reader sees the old file or the new one, never half of it.

    What a kill leaves behind has one name, so the next write replaces it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with os.fdopen(
            os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PARTIAL), "w", encoding="utf-8"
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
