"""Finished requests in logs and data files: their token ids, and which of them a model wrote.

A row is one of
- a line of SGLang's log (`--log-requests --log-requests-level 3 --log-requests-format json`); only its
  `request.finished` events are requests;
- `input_ids` and `output_ids`;
- `input_ids` with `loss_mask` or `labels`, as the data of a search.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_rows import request_log
from indexcache_rows.request_log import Finished
from indexcache_search.data.formats import Record
from indexcache_search.data.shapes import Section, shape_of
from indexcache_search.errors import DataError, RowError
from indexcache_watch.files import GrowingFiles, files_of, is_event

LARGEST_ID = (1 << 31) - 1
BAD = "it can't be understood"
_WRITTEN = ("loss_mask", "labels")  # say what a model wrote


@dataclass(frozen=True, eq=False)
class Request:
    """A finished request.

    Attributes:
        place: where it stands, such as `FILE: line 3`.
        tokens: `[n]` int, its prompt and what was written.
        counts: `[n]` bool, the tokens whose loss is compared; at least one, never the first token.
        name: what servers that work on one request together call it; `None` if nobody says.
    """

    place: str
    tokens: NDArray[np.int64]
    counts: NDArray[np.bool_]
    name: str | None = None

    @property
    def digest(self) -> str:
        """Digest of its content; equal requests are one."""
        digest = hashlib.sha256(self.tokens.astype("<i8").tobytes())
        digest.update(np.packbits(self.counts).tobytes())
        return digest.hexdigest()[:16]

    @property
    def origin(self) -> str | None:
        """Digest of its name, prompt and first written token: of a prefill server's line and of the decode server's."""
        if self.name is None:
            return None
        until = self.tokens[: int(self.counts.argmax()) + 1]
        return hashlib.sha256(f"{self.name} ".encode() + until.astype("<i8").tobytes()).hexdigest()[:16]


class RequestLog:
    """A file or folder of requests that may still grow; each of its rows is read once, see `GrowingFiles`.

    Args:
        path: the file or folder.
        skip_bad: most rows that are left out because they can't be understood.

    Attributes:
        skipped: number of rows that hold no request to score, by reason.
        left_out: files that look like logs, but have an ending that is not known.
    """

    def __init__(self, path: Path, skip_bad: int = 0) -> None:
        self.path, self._skip_bad = path, skip_bad
        self.skipped: Counter[str] = Counter()
        self.left_out: list[Path] = []
        self._growing = GrowingFiles()

    def new(self, last: bool = True) -> Iterator[Request]:
        """Yield the requests that were not read yet.

        Args:
            last: also read what files get while they are read, and a last line without a line break: no more will
                follow.

        Raises:
            DataError: if the path can't be read, or more than `skip_bad` rows can't be understood.
        """
        more = True
        while more:
            more = False
            files, self.left_out = files_of(self.path)
            for file in files:
                for place, record in self._growing.records(file, last):
                    more = last
                    request = self._read(place, record)
                    if isinstance(request, Request):
                        yield request
                    elif request is not None:
                        self.skipped[request] += 1

    def _read(self, place: str, record: Record) -> Request | str | None:
        try:
            return read(place, record)
        except RowError as error:
            if self.skipped[BAD] >= self._skip_bad:
                raise DataError(f"{place}: {error}; --skip-bad N leaves out up to N such rows") from None
            return BAD


def read(place: str, record: Record) -> Request | str | None:
    """Return the request of a row, why it has none to score, or `None` if it is no request at all.

    Raises:
        RowError: if the row can't be understood.
    """
    if isinstance(record, RowError):
        raise record
    name = None
    if is_event(record):
        logged = Finished.of(record) if _is_finished(record) else None
        if logged is None:
            return None
        why_not = _why_not(logged)
        if why_not is not None:
            return why_not
        name, record = logged.name, {"input_ids": logged.prompt.value, "output_ids": logged.reply.value}
    if record.get("input_ids") is None:
        raise RowError("has no input_ids, expected them with output_ids, loss_mask or labels, or SGLang's log")
    if record.get("output_ids") is not None:
        parts = [_ids(record.get(name), name) for name in ("input_ids", "output_ids")]
        tokens = np.concatenate(parts)
        counts = np.arange(len(tokens)) >= len(parts[0])
    elif all(record.get(name) is None for name in _WRITTEN):
        raise RowError(f"has input_ids alone, expected {', '.join(_WRITTEN)} or output_ids beside them")
    else:
        section = shape_of(record).read(record)
        assert isinstance(section, Section)  # the first shape is that of input_ids
        tokens, counts = _ids(section.tokens.tolist(), "input_ids"), section.mask.astype(np.bool_)
    counts = counts & (np.arange(len(tokens)) > 0)
    return Request(place, tokens, counts, name) if counts.any() else "none of its tokens count"


def _is_finished(record: Mapping[str, Any]) -> bool:
    """Return true for a finished request among events."""
    return bool(record.get(request_log.EVENT, request_log.FINISHED) == request_log.FINISHED)


def _why_not(logged: Finished) -> str | None:
    """Say why a logged request can't be scored as tokens alone, or `None`."""
    if logged.adapter is not None:
        return f"a LoRA adapter wrote its reply: {logged.adapter}"
    if logged.unlike is not None:
        return logged.unlike
    if logged.hidden:
        return "its log has no tokens, expected --log-requests-level 3"
    if logged.reply.value is None:
        return "its log has no output_ids"
    if logged.prompt.value is None:
        return "its log has the prompt as text, or not at all"
    if logged.cut:
        return request_log.CUT
    if logged.several:
        return "it is several requests at once"
    if logged.short is not None:
        return f"its log has not all of its {'input_ids' if logged.short[0] is logged.prompt else 'output_ids'}"
    return None


def _ids(values: Any, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise RowError(f"{name} is not a list of integers")
    wrong = [value for value in values if not 0 <= value <= LARGEST_ID]
    if wrong:
        raise RowError(f"{name} holds {str(wrong[0])[:24]}, expected token ids")
    return np.asarray(values, np.int64)
