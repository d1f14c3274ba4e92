"""JSON lines with checksums, each over its line and all lines before it.

A changed, missing or exchanged line is damage. A last line without a line break was cut off by a kill, and is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from indexcache_search.errors import JournalError
from sglang_indexcache.io.naming import naming

_LONGEST = 1 << 20  # bytes of a first line
_END = re.compile(rb', "check": "([0-9a-f]{16})"\}$')


class Sealer:
    """Writer and reader of one file's lines, in order."""

    def __init__(self) -> None:
        self._chain = b""

    def seal(self, record: Mapping[str, Any]) -> bytes:
        """Return the next line, with its line break.

        Raises:
            ValueError: for NaN and infinity, which JSON does not have.
        """
        text = json.dumps(record, allow_nan=False).encode()
        return text[:-1] + b', "check": "' + self._next(text) + b'"}\n'

    def open(self, line: bytes) -> dict[str, Any] | None:
        """Return the record of the next line, given without line break; `None` if it is damaged."""
        end = _END.search(line)
        if end is None:
            return None
        text = line[: end.start()] + b"}"
        before = self._chain
        if self._next(text) != end.group(1):
            self._chain = before
            return None
        content = json.loads(text)
        return content if isinstance(content, dict) else None

    def _next(self, text: bytes) -> bytes:
        self._chain = hashlib.sha256(self._chain + text).hexdigest()[:16].encode()
        return self._chain


def append(file: IO[bytes], sealer: Sealer, record: Mapping[str, Any]) -> None:
    """Write the next line of `file`; it is on disk when this returns."""
    line = sealer.seal(record)
    with naming(file.name):
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def check_identity(path: Path, what: str, option: str, recorded: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check that the identity recorded in `path` is this run's own, of a kind `what` whose `option` names the folder.

    Raises:
        JournalError: naming the first difference.
    """
    for key in sorted({*recorded, *own}):
        if recorded.get(key) != own.get(key):
            raise JournalError(
                f"{path}: belongs to a {what} with {key} {recorded.get(key)}, now it is {own.get(key)};"
                f" choose another {option}, or --restart to discard it"
            )


def complete(content: bytes) -> bytes:
    """Return `content` without a last line that was cut off."""
    return content[: content.rfind(b"\n") + 1]


def may_be_sealed(path: Path) -> bool:
    """Return true if a file may be a sealed one, whole, damaged or cut off: it is empty, or a line has a checksum."""
    with path.open("rb") as file:
        first = file.readline(_LONGEST)
        if not first.endswith(b"\n"):
            return not first or first.startswith(b"{")
        return any(_END.search(line.rstrip(b"\n")) for line in (first, *file))


def opened(content: bytes, name: str, sealer: Sealer) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers and records of complete lines; `sealer` continues from the last.

    Raises:
        JournalError: naming the first damaged line.
    """
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        record = sealer.open(line)
        if record is None:
            raise damaged(name, number)
        yield number, record


def damaged(name: object, number: int) -> JournalError:
    """Return the error for a damaged line."""
    return JournalError(f"{name}: line {number} is damaged; --restart discards the file")
