"""Files of lines that grow, and are renamed, copied, cut or compressed meanwhile: each line is read once.

What was read is known by its content, not by its name: a file that begins with all that was read of another one is read
on from there. So a log counts once whether it is renamed (as SGLang does), copied and cut, or compressed.
"""

from __future__ import annotations

import codecs
import copy
import gzip
import hashlib
import os
import re
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from indexcache_rows import request_log
from indexcache_search.data.formats import LINES, Record, kind_of, records
from indexcache_search.errors import DataError, RowError
from sglang_indexcache.io.atomic import reason
from sglang_indexcache.io.errors import one_line

_NAMED = re.compile(r"\.(jsonl|ndjson|log)\b")
ENDINGS = ".log, .jsonl or .ndjson (rotated: .log.1, .log-20261128; with .gz behind it), .json, .parquet, .arrow"
_NO_OBJECT = "not an object such as {...}; expected one on each line"
_BATCH = 1 << 22  # bytes of lines at a time; while they are scored, the file may be cut
_ENDS = 512  # bytes of the beginning, and of the end of what was read, that tell a file that was cut from one that grew
_NO_JSON = "not JSON; expected SGLang's log with --log-requests-format json, or rows with input_ids"
_CUT_OFF = (EOFError, zlib.error, gzip.BadGzipFile)


class _Reading:
    """How far a content was read.

    Attributes:
        end: bytes.
        lines: lines.
        head: its first bytes.
        tail: the last bytes that were read.
        done: size and time of the file when nothing was left of it.
    """

    def __init__(self) -> None:
        self.end, self.lines, self.head, self.tail = 0, 0, b"", b""
        self.done: tuple[int, int] | None = None
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, line: bytes) -> None:
        self._digest.update(line)
        self.end, self.lines = self.end + len(line), self.lines + 1
        self.head = (self.head + line)[:_ENDS] if len(self.head) < _ENDS else self.head
        self.tail = (self.tail + line)[-_ENDS:]

    def grew_into(self, file: IO[bytes], size: int) -> bool:
        """Whether an open file that was read so far still has it, by its ends."""
        file.seek(0)
        if size < self.end or file.read(len(self.head)) != self.head:
            return False
        file.seek(self.end - len(self.tail))
        return file.read(len(self.tail)) == self.tail

    def begins(self, file: IO[bytes]) -> bool:
        """Whether an open file begins with all that was read."""
        file.seek(0)
        if file.read(len(self.head)) != self.head:
            return False
        file.seek(0)
        digest, left = hashlib.blake2b(digest_size=16), self.end
        while left and (piece := file.read(min(left, _BATCH))):
            digest.update(piece)
            left -= len(piece)
        return not left and digest.digest() == self._digest.digest()

    def copied(self) -> _Reading:
        found = copy.copy(self)
        found._digest = self._digest.copy()
        found.done = None
        return found


class GrowingFiles:
    """Reads records of files, each once; see above.

    Files that have no lines (`.json`, `.parquet`, `.arrow`) are read once, whole.
    """

    def __init__(self) -> None:
        self._readings: dict[tuple[int, int], _Reading] = {}  # by device and inode
        self._gone: list[_Reading] = []  # of files that were cut, or whose inode another file has

    def records(self, file: Path, last: bool) -> Iterator[tuple[str, Record]]:
        """Yield what was not read yet of a file, with its place.

        Args:
            file: ends as `ENDINGS` says.
            last: also read a last line without a line break: no more will follow.

        Raises:
            DataError: if the file can't be read.
        """
        try:
            if not LINES.search(file.name):
                yield from self._whole(file)
                return
            while (yield from self._lines(file, last)):
                pass
        except FileNotFoundError:  # renamed meanwhile: the next look finds it
            return
        except OSError as error:
            raise DataError(f"{file}: can't be read: {one_line(reason(error), 200)}") from None

    def _lines(self, file: Path, last: bool) -> Generator[tuple[str, Record], None, bool]:
        """Yield lines of a file, at most a batch of one that may be cut meanwhile; return whether there are more."""
        with file.open("rb") as raw:
            status = os.fstat(raw.fileno())
            key, state = (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns)
            if key in self._readings and self._readings[key].done == state:
                return False
            compressed = file.suffix.lower() == ".gz"
            lines = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if compressed else raw
            try:
                reading = self._reading(key, lines, None if compressed else status.st_size)
                lines.seek(reading.end)
                for line in lines if compressed else lines.readlines(_BATCH):
                    record = _record(line)
                    unfinished = isinstance(record, RowError) and str(record) != _NO_OBJECT
                    if not line.endswith(b"\n") and (not last or unfinished):
                        if compressed:
                            reading.done = state
                        break  # still being written, or cut off by the end of its server
                    reading.add(line)
                    if line.strip():
                        yield f"{file}: line {reading.lines}", record
                else:
                    if not compressed and reading.end < status.st_size:
                        return True
                    reading.done = state
            except _CUT_OFF as error:
                if not file.with_suffix("").exists():  # else it is still being compressed
                    reading = self._readings.setdefault(key, _Reading())
                    reading.done = state
                    line_of = f"{file}: line {reading.lines + 1}"
                    yield line_of, RowError(f"its compressed file is cut off or damaged: {one_line(error, 100)}")
        return False

    def _whole(self, file: Path) -> Iterator[tuple[str, Record]]:
        status = file.stat()
        key = (status.st_dev, status.st_ino)
        if key not in self._readings:
            yield from records(file)
            self._readings[key] = _Reading()

    def _reading(self, key: tuple[int, int], file: IO[bytes], size: int | None) -> _Reading:
        """Return how far an open file was read: as itself, or as a file that it is a copy of, whichever is further.

        Args:
            key: device and inode.
            file: its content, decompressed.
            size: bytes of it; `None` of compressed ones, which nobody cuts.
        """
        known = self._readings.pop(key, None)
        if known is not None and size is not None and not known.grew_into(file, size):
            self._gone.append(known)
            known = None
        found = known or _Reading()
        others = (other for other in (*self._readings.values(), *self._gone) if other.end > found.end)
        for other in sorted(others, key=lambda other: -other.end):
            if other.begins(file):
                found = other.copied()
                break
        self._readings[key] = found
        return found


def is_event(record: Mapping[str, Any]) -> bool:
    """Return true for what SGLang logs, finished or not, and for what `finished` returns."""
    return request_log.EVENT in record or {"obj", "out"} <= record.keys()


def _record(line: bytes) -> Record:
    """Return the object on a line, which a byte order mark may begin, as in files from Windows."""
    line = line.removeprefix(codecs.BOM_UTF8)
    try:
        words = line.decode()
    except UnicodeDecodeError:
        return RowError(_NO_JSON)
    content = request_log.loaded(words)
    if request_log.is_containers(words) and not (isinstance(content, dict) and is_event(content)):
        return RowError(
            "is a container's output, in which long lines are cut; expected SGLang's own file, with"
            " --log-requests-target FOLDER"
        )
    if content is None:
        return RowError(_NO_JSON)
    return content if isinstance(content, dict) else RowError(_NO_OBJECT)


def files_of(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files with requests below `path`, the oldest first, and those that look so but can't be read.

    Raises:
        DataError: if there is none.
    """
    try:
        if not path.is_dir():
            if not path.is_file():
                raise DataError(f"--requests: {path}: no such file or folder")
            if not _readable(path):
                raise DataError(f"--requests: {path}: ending is not known, expected {ENDINGS}")
            return [path], []
        found, left_out = list[Path](), list[Path]()
        for file in path.rglob("*"):
            if any(part.startswith(".") for part in file.relative_to(path).parts) or not file.is_file():
                continue
            if _readable(file):
                found.append(file)
            elif _NAMED.search(file.name.lower()):
                left_out.append(file)
        if not found:
            raise DataError(f"--requests: {path}: no file in this folder ends with {ENDINGS}")
        return sorted(found, key=_age), sorted(left_out)
    except OSError as error:
        raise DataError(f"--requests: {path}: {reason(error)}") from None


def _readable(file: Path) -> bool:
    return bool(LINES.search(file.name)) or kind_of(file) in ("json", "parquet", "arrow")


def _age(path: Path) -> tuple[int, Path]:
    try:
        return path.stat().st_mtime_ns, path
    except FileNotFoundError:  # renamed meanwhile
        return 0, path
