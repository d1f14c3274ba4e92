"""Finished requests in logs and data files: their token ids, and which of them a model wrote.

A row is one of
- a line of SGLang's log (`--log-requests --log-requests-level 3 --log-requests-format json`); only its
  `request.finished` events are requests;
- `input_ids` and `output_ids`;
- `input_ids` with `loss_mask` or `labels`, as the data of a search.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.formats import Record, kind_of, records
from indexcache_search.data.shapes import Section, shape_of
from indexcache_search.errors import DataError, RowError
from sglang_indexcache.errors import one_line
from sglang_indexcache.files.atomic import reason

LARGEST_ID = (1 << 31) - 1
_LINES = re.compile(r"\.(jsonl|ndjson|log|log\.[\d_-]+)$")  # SGLang renames its log every hour
_STAMP = re.compile(rb"\[[\d :,.-]+\] (?=\{)")  # before each line of SGLang's log
BAD = "it can't be understood"
_EVENT, _FINISHED = "event", "request.finished"
_ENDINGS = ".log, .jsonl, .ndjson, .json, .parquet or .arrow"


@dataclass(frozen=True, eq=False)
class Request:
    """A finished request.

    Attributes:
        place: where it stands, such as `FILE: line 3`.
        tokens: `[n]` int, its prompt and what was written.
        counts: `[n]` bool, the tokens whose loss is compared; at least one, never the first token.
    """

    place: str
    tokens: NDArray[np.int64]
    counts: NDArray[np.bool_]

    @property
    def digest(self) -> str:
        """Digest of its content; equal requests are one."""
        digest = hashlib.sha256(self.tokens.astype("<i8").tobytes())
        digest.update(np.packbits(self.counts).tobytes())
        return digest.hexdigest()[:16]


class RequestLog:
    """A file or folder of requests that may still grow.

    Files of lines are read on from where the last reading ended, and from their beginning if they were cut; other files
    are read once.

    Args:
        path: the file or folder.
        skip_bad: most rows that are left out because they can't be understood.

    Attributes:
        skipped: number of rows that hold no request to score, by reason.
    """

    def __init__(self, path: Path, skip_bad: int = 0) -> None:
        self.path, self._skip_bad = path, skip_bad
        self.skipped: dict[str, int] = {}
        self._ends: dict[tuple[int, int], tuple[int, int]] = {}  # by device and inode: bytes and lines read

    def new(self, last: bool = True) -> Iterator[Request]:
        """Yield the requests that were not read yet.

        Args:
            last: also read a last line without a line break: no more will follow.

        Raises:
            DataError: if the path can't be read, or more than `skip_bad` rows can't be understood.
        """
        for file in self._files():
            for place, record in self._records(file, last):
                try:
                    request = read(place, record)
                except RowError as error:
                    if self.skipped.get(BAD, 0) >= self._skip_bad:
                        raise DataError(f"{place}: {error}; --skip-bad N leaves out up to N such rows") from None
                    request = BAD
                if isinstance(request, Request):
                    yield request
                elif request is not None:
                    self.skipped[request] = self.skipped.get(request, 0) + 1

    def _files(self) -> list[Path]:
        """Return the files with requests, the oldest first."""
        try:
            if not self.path.is_dir():
                if not self.path.is_file():
                    raise DataError(f"--requests: {self.path}: no such file or folder")
                if not _LINES.search(self.path.name.lower()) and kind_of(self.path) in (None, "text", "csv"):
                    raise DataError(f"--requests: {self.path}: ending is not known, expected {_ENDINGS}")
                return [self.path]
            files = [
                path
                for path in self.path.rglob("*")
                if not any(part.startswith(".") for part in path.relative_to(self.path).parts)
                and path.is_file()
                and (_LINES.search(path.name.lower()) or kind_of(path) in ("json", "parquet", "arrow"))
            ]
            if not files:
                raise DataError(f"--requests: {self.path}: no file in this folder ends with {_ENDINGS}")
            return sorted(files, key=_age)
        except OSError as error:
            raise DataError(f"--requests: {self.path}: {reason(error)}") from None

    def _records(self, file: Path, last: bool) -> Iterator[tuple[str, Record]]:
        try:
            status = file.stat()
        except FileNotFoundError:  # renamed meanwhile: the next reading finds it
            return
        key = (status.st_dev, status.st_ino)
        if not _LINES.search(file.name.lower()):
            if key not in self._ends:
                yield from records(file)
            self._ends[key] = (status.st_size, 0)
            return
        start, number = self._ends.get(key, (0, 0))
        if status.st_size < start:  # cut, or another file in the place of one that was deleted
            start, number = 0, 0
        try:
            with file.open("rb") as lines:
                lines.seek(start)
                for line in lines:
                    record = _line(line)
                    if not line.endswith(b"\n") and (not last or isinstance(record, RowError)):
                        break  # still being written
                    start, number = start + len(line), number + 1
                    self._ends[key] = (start, number)
                    if line.strip():
                        yield f"{file}: line {number}", record
        except OSError as error:
            raise DataError(f"{file}: can't be read: {one_line(reason(error), 200)}") from None


def _age(path: Path) -> tuple[int, Path]:
    try:
        return path.stat().st_mtime_ns, path
    except FileNotFoundError:  # renamed meanwhile
        return 0, path


def _line(line: bytes) -> Record:
    stamp = _STAMP.match(line)
    try:
        content = json.loads(line[0 if stamp is None else stamp.end() :].decode())
    except (ValueError, RecursionError):
        return RowError("not JSON; expected SGLang's log with --log-requests-format json, or rows with input_ids")
    return content if isinstance(content, dict) else RowError("not an object such as {...}")


def read(place: str, record: Record) -> Request | str | None:
    """Return the request of a row, why it has none to score, or `None` if it is no request at all.

    Raises:
        RowError: if the row can't be understood.
    """
    if isinstance(record, RowError):
        raise record
    if _EVENT in record:
        if record[_EVENT] != _FINISHED:
            return None
        sent, out = (_object(record.get(name), name) for name in ("obj", "out"))
        if sent.get("log_metrics") is False:  # health checks, and what a watch sends itself
            return None
        if sent.get("input_ids") is None and out.get("prompt_token_ids") is None:
            return "its log has the prompt as text, or not at all"
        prompt = out.get("prompt_token_ids") if sent.get("input_ids") is None else sent["input_ids"]
        if "output_ids" not in out:
            return "its log has no output_ids"
        record = {"input_ids": prompt, "output_ids": out["output_ids"]}
        if any(isinstance(ids, list) and "..." in ids for ids in record.values()):
            return "its log is cut, expected --log-requests-level 3"
        counted = _object(out.get("meta_info", {}), "out.meta_info")
        for name, count in (("input_ids", "prompt_tokens"), ("output_ids", "completion_tokens")):
            ids = record[name]  # not all with images, or with --incremental-streaming-output
            if isinstance(ids, list) and counted.get(count, len(ids)) != len(ids):
                return f"its log has not all of its {name}"
    if record.get("input_ids") is None:
        raise RowError("has no input_ids, expected them with output_ids, loss_mask or labels, or SGLang's log")
    if record.get("output_ids") is not None:
        parts = [_ids(record.get(name), name) for name in ("input_ids", "output_ids")]
        tokens = np.concatenate(parts)
        counts = np.arange(len(tokens)) >= len(parts[0])
    else:
        section = shape_of(record).read(record)
        assert isinstance(section, Section)  # the first shape is that of input_ids
        tokens, counts = _ids(section.tokens.tolist(), "input_ids"), section.mask.astype(np.bool_)
    counts = counts & (np.arange(len(tokens)) > 0)
    return Request(place, tokens, counts) if counts.any() else "none of its tokens count"


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{name} is {type(value).__name__}, expected an object")
    return value


def _ids(values: Any, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise RowError(f"{name} is not a list of integers")
    wrong = [value for value in values if not 0 <= value <= LARGEST_ID]
    if wrong:
        raise RowError(f"{name} holds {str(wrong[0])[:24]}, expected token ids")
    return np.asarray(values, np.int64)
