"""The journal: every evaluation is on disk as soon as it is done, so that a killed search loses at most one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from indexcache_search.errors import JournalError
from indexcache_search.evaluation.losses import COLUMNS, Evaluation
from indexcache_search.evaluation.plan import Plan
from indexcache_search.evaluation.records import Sealer, append, check_identity, complete, damaged, opened
from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.fields import Count, Finite

FILE_NAME = "journal.jsonl"

_Key = tuple[str, Plan, int]  # set, pattern, repeat


class Journal:
    """Append-only JSON-lines file of one search, for use in a `with` block.

    Its first line holds the identity; a later run with another model, data or objective is refused. Results do not
    depend on the strategy, so strategies share them. A line cut off by a kill is dropped. Every line has a checksum,
    and a line that fails it is refused.

    Args:
        folder: the work directory, created if missing. Callers hold it against other processes (`workdir.outputs`).
        identity: conditions on which results depend.
        facts: facts of the first run, such as the date; not compared.
        restart: discard earlier records.
        parse: parses the keys of plans; raises `PatternError` for other text.

    Raises:
        JournalError: if the folder holds another search, or is damaged.
    """

    records = 0  # evaluations that were read or added

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        facts: Mapping[str, Any],
        restart: bool = False,
        parse: Callable[[str], Plan] = Pattern.from_key,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self.path, flags, 0o666), "a+b")
        try:
            if restart:
                self._file.truncate(0)
            self._sealer = Sealer()
            self.facts: Mapping[str, Any] = dict(facts)
            self._evaluations: dict[_Key, Evaluation] = {}
            self._matrices: dict[str, list[list[float]]] = {}
            self._speeds: dict[str, list[dict[str, Any]]] = {}
            self._read(json.loads(json.dumps(identity)), parse)
        except BaseException:
            self._file.close()
            raise

    def _read(self, identity: Mapping[str, Any], parse: Callable[[str], Plan]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = complete(content)
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        if not whole:
            self._append({"identity": identity, "facts": self.facts})
            return
        for record in records_of(whole, self.path, self._sealer, parse):
            if isinstance(record, _Header):
                check_identity(self.path, "search", "--work-dir", record.identity, identity)
                self.facts = record.facts
            elif isinstance(record, _Matrix):
                self._matrices[record.matrix] = record.values
            elif isinstance(record, _Speed):
                self._speeds[record.speed] = record.rows
            else:
                self._add(*record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def evaluation(self, part: str, pattern: Plan, repeat: int = 0) -> Evaluation | None:
        """Return the recorded evaluation of `pattern` on the set named `part`, on all its sequences, if any."""
        return self._evaluations.get((part, pattern, repeat))

    def known(self, part: str) -> list[Evaluation]:
        """Return all recorded evaluations on the set named `part`, one a pattern."""
        return [item for (name, _, _), item in self._evaluations.items() if name == part]

    def add_evaluation(self, part: str, evaluation: Evaluation, repeat: int = 0) -> None:
        """Record an evaluation; it is on disk when this returns."""
        self._append(
            {
                "set": part,
                "pattern": evaluation.pattern.key,
                "repeat": repeat,
                "rows": evaluation.rows,
                **{name: getattr(evaluation, name) for name in COLUMNS},
                "seconds": round(evaluation.seconds, 3),
            }
        )
        self._add((part, evaluation.pattern, repeat), evaluation)

    def _add(self, key: _Key, evaluation: Evaluation) -> None:
        self.records += 1
        earlier = self._evaluations.get(key)
        self._evaluations[key] = evaluation if earlier is None else earlier + evaluation

    def matrix(self, name: str) -> list[list[float]] | None:
        """Return a recorded measurement, if there is one."""
        return self._matrices.get(name)

    def add_matrix(self, name: str, values: list[list[float]]) -> None:
        """Record a measurement."""
        self._append({"matrix": name, "values": values})
        self._matrices[name] = values

    def speed(self, name: str) -> list[dict[str, Any]] | None:
        """Return recorded rows of speed, if there are any."""
        return self._speeds.get(name)

    def add_speed(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Record rows of speed, see `results.schema.SpeedRow`."""
        self._append({"speed": name, "rows": rows})
        self._speeds[name] = rows

    def _append(self, record: Mapping[str, Any]) -> None:
        append(self._file, self._sealer, record)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Header(_Record):
    identity: dict[str, Any]
    facts: dict[str, str]


class _Matrix(_Record):
    matrix: str
    values: list[list[Finite]]


class _Speed(_Record):
    speed: str
    rows: list[dict[str, Any]]


class _Line(_Record):
    set: str
    pattern: str
    repeat: Count
    rows: list[Count]
    losses: list[Finite]
    correct: list[Count]
    tokens: list[Count]
    layer_tokens: list[Count]
    seconds: Finite

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.rows or {len(getattr(self, name)) for name in COLUMNS} != {len(self.rows)}:
            raise ValueError("columns differ in length")
        if len(set(self.rows)) < len(self.rows) or 0 in self.tokens:
            raise ValueError("a sequence stands there twice, or without tokens")
        return self

    def parse(self, parse: Callable[[str], Plan]) -> tuple[_Key, Evaluation]:
        columns: dict[str, Any] = {name: tuple(getattr(self, name)) for name in ("rows", *COLUMNS)}
        evaluation = Evaluation(pattern=parse(self.pattern), seconds=self.seconds, **columns)
        return (self.set, evaluation.pattern, self.repeat), evaluation


def records_of(
    content: bytes, path: Path, sealer: Sealer, parse: Callable[[str], Plan]
) -> Iterator[_Header | _Matrix | _Speed | tuple[_Key, Evaluation]]:
    """Parse the records of a journal, line by line.

    Raises:
        JournalError: if a line is damaged, or this version can't parse its pattern.
    """
    for number, record in opened(content, str(path), sealer):
        try:
            if number == 1:
                yield _Header.model_validate(record)
            elif "matrix" in record:
                yield _Matrix.model_validate(record)
            elif "speed" in record:
                yield _Speed.model_validate(record)
            else:
                yield _Line.model_validate(record).parse(parse)
        except PatternError as error:  # written by a version with other patterns
            raise JournalError(f"{path}: line {number}: {error}; --restart discards the file") from None
        except ValidationError:
            raise damaged(path, number) from None
