"""Records of one file in any supported format, each with its location, streamed where the format allows."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

from indexcache_search.data.shapes import kind
from indexcache_search.errors import DataError, NoRequestsError, RowError
from sglang_indexcache.io.atomic import reason
from sglang_indexcache.io.errors import one_line
from sglang_indexcache.io.extensions import first_made
from sglang_indexcache.io.faults import is_pointer

KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".log": "log",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
ENDINGS = (
    ".jsonl, .ndjson, .json, .csv, .txt, .md, .rst (also with .gz or .zst behind it), .parquet, .arrow, .log (SGLang's,"
    " also rotated)"
)
_TABLES = ("parquet", "arrow")  # compressed inside
_BATCH = 256  # rows of a table turned into objects at a time
_ARROW = b"ARROW1"
_BEGINNING = 1024  # bytes of a file by which a pointer is known
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


LINES = re.compile(r"\.(?P<kind>jsonl|ndjson|log)([.-][\dT:_.-]*\d)?(\.gz)?$", re.IGNORECASE)
"""Names of files of lines, also as SGLang (every hour) and logrotate rename and compress them."""
LOG_FLAGS = "--log-requests --log-requests-level 3"

Record = Mapping[str, Any] | RowError
"""A row, or what is wrong with one that can't be read."""


class LogFormat(ABC):
    """A log of requests, of an extension's entry point of the group `indexcache.logs`."""

    @abstractmethod
    def is_line(self, line: str) -> bool:
        """Return true for a line of such a log."""

    @abstractmethod
    def requests(self, lines: Iterable[str]) -> Iterator[tuple[int, Record]]:
        """Yield the requests that lines hold, each with the number of its line, from 1."""


def kind_of(path: Path) -> str | None:
    """Return the format that a file's ending names, ignoring case; `None` if it is not a data file."""
    lines = LINES.search(path.name)
    if lines is not None:
        return "log" if lines["kind"].lower() == "log" else "json"
    compressed = path.suffix.lower() in COMPRESSIONS
    kind = KINDS.get((path.with_suffix("") if compressed else path).suffix.lower())
    return None if compressed and kind in _TABLES else kind


def records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the location of each record, such as `FILE: line 3`, and the record.

    Raises:
        DataError: if the file as a whole can't be read.
    """
    read = {"json": _json, "csv": _csv, "text": _text, "parquet": _parquet, "arrow": _arrow, "log": _log}[
        kind_of(path) or ""
    ]
    try:
        with path.open("rb") as file:
            if is_pointer(file.read(_BEGINNING)):
                raise DataError(f"{path}: is a Git LFS pointer, not the data; expected the file that git lfs pull gets")
        for place, record in read(path):
            yield f"{path}: {place}" if place else str(path), record
    except DataError:
        raise
    except (OSError, ValueError, EOFError) as error:  # pyarrow's own are OSError and ValueError
        raise DataError(f"{path}: can't be read: {one_line(reason(error), 200)}") from None


@contextmanager
def _opened(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a file's text, decompressed, in the encoding its byte order mark names, else UTF-8.

    A byte that is not UTF-8 becomes a surrogate, so only the record that holds it is rejected.
    """
    from pyarrow import input_stream

    compression = COMPRESSIONS.get(path.suffix.lower())
    with input_stream(str(path), compression=compression) as start:
        beginning = start.read(4)
    encoding = next((name for mark, name in _MARKS if beginning.startswith(mark)), "utf-8-sig")
    errors = "surrogateescape" if encoding == "utf-8-sig" else "strict"
    with (
        input_stream(str(path), compression=compression) as raw,
        io.TextIOWrapper(raw, encoding, errors, newline) as file,
    ):
        yield file


def _json(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the rows of JSON lines, of one JSON list, or of one object over several lines."""
    with _opened(path) as file:
        first = next((line for line in file if line.strip()), "")
    if (log := _log_format()) is not None and log.is_line(first):
        yield from _log(path)
        return
    many_lines = "json" in path.name.lower().split(".")[-2:] and isinstance(_row(first), RowError)
    with _opened(path) as file:
        if not many_lines and not first.lstrip().startswith("["):
            yield from ((f"line {number}", _row(line)) for number, line in enumerate(file, 1) if line.strip())
            return
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            place = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(f"{path}: not JSON{place}") from None
        rows = content if isinstance(content, list) else [content]
        yield from ((f"row {number}", _object(row)) for number, row in enumerate(rows, 1))


def _log(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the requests in a server's log; other lines may stand there."""
    found, log = False, _log_format()
    if log is None:
        raise DataError(f"{path}: is a log of requests, which needs an extension that is not installed")
    with _opened(path) as file:
        for number, record in log.requests(file):
            found = True
            yield f"line {number}", record
    if not found:
        raise NoRequestsError(f"{path}: has no finished request, expected SGLang's log with {LOG_FLAGS}")


def _log_format() -> LogFormat | None:
    found: LogFormat | None = first_made("logs", LogFormat)
    return found


def _row(line: str) -> Record:
    try:
        return _object(json.loads(line.removeprefix("\ufeff")))  # of a file that was appended to another
    except (ValueError, RecursionError):
        return RowError("not JSON")


def _object(content: Any) -> Record:
    if isinstance(content, dict):
        return content
    return RowError(f'found {kind(content)}, expected an object such as {{"text": ...}}')


def _csv(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the rows below the header line; an empty cell is null."""
    csv.field_size_limit(sys.maxsize)  # a document may be long
    with _opened(path, newline="") as file:
        rows = csv.reader(file, strict=True)
        names = next(rows, [])
        if len(set(names)) < len(names) or not all(names):
            raise DataError(f"{path}: line 1: found {len(names)} names of columns, expected each once and none empty")
        for number in count(1):
            try:
                cells = next(rows, None)
            except csv.Error as error:
                yield f"row {number}", RowError(f"not CSV: {error}")
                continue
            if cells is None:
                return
            if len(cells) not in (0, len(names)):
                yield f"row {number}", RowError(f"found {len(cells)} cells, expected {len(names)}, as many as names")
            elif cells:
                yield f"row {number}", {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _text(path: Path) -> Iterator[tuple[str, Record]]:
    with _opened(path) as file:
        yield "", {"text": file.read()}


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from _rows(file.iter_batches(batch_size=_BATCH))


def _arrow(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the rows of either kind of IPC data: a file, or the stream that `datasets` writes."""
    from pyarrow import OSFile, ipc

    with OSFile(str(path)) as file:
        is_file = file.read(len(_ARROW)) == _ARROW
        file.seek(0)
        found = (ipc.open_file if is_file else ipc.open_stream)(file)
        batches = map(found.get_batch, range(found.num_record_batches)) if is_file else found
        yield from _rows(batch.slice(start, _BATCH) for batch in batches for start in range(0, batch.num_rows, _BATCH))


def _rows(batches: Iterator[Any]) -> Iterator[tuple[str, Record]]:
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    yield from ((f"row {number}", table_row(row)) for number, row in enumerate(rows, 1))


def table_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table row without null fields of its objects, since a table gives every object all fields."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_without_nulls(item) for item in value]
    return value
