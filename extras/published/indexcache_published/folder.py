"""The output folder of a search: what is in it, and whether its files belong together and are unchanged.

A search leaves a mark that lists the sha256 of each file. That the files are those of the mark, and that metrics.json
and README.md are of this pattern.yaml, proves that nothing was changed or mixed up by mistake. It does not prove who
wrote them: whoever changes a file can write another mark.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from indexcache_published.hub import HubFile
from sglang_indexcache.io.atomic import read_json_object, read_regular
from sglang_indexcache.io.digest import file_digest
from sglang_indexcache.io.errors import FileError, IndexCacheError, PatternFileError
from sglang_indexcache.pattern_file.file import PatternFile
from sglang_indexcache.pattern_file.result_folder import (
    CARD,
    FILES,
    MARK,
    METRICS,
    PAGES,
    PATTERN,
    SEARCH,
    ResultFolder,
)

MAX_BYTES = 64 << 20  # of each of them

_Listed = list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]


class _Mark(BaseModel):
    """Part of a mark that a reader needs."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    schema_: Literal["indexcache-run/v1"] = Field(alias="schema")
    command: str
    files: dict[str, _Listed | None]


@dataclass(frozen=True)
class SearchFolder(ResultFolder):
    """The folder of a search, on this machine or as a repository of the hub.

    Attributes:
        path: where its files are; of a repository, in the cache of the hub's client.
        name: as it was written; of a repository, with its commit.
    """

    path: Path
    name: str

    @classmethod
    def find(cls, text: str) -> Self | None:
        """See `ResultFolder.find`; of a repository, its files are downloaded first."""
        if os.path.isdir(text):  # noqa: PTH112 (Path.is_dir raises for names that are too long)
            return cls(Path(text), text)
        file = HubFile.in_repository(text, MARK)
        if file is None:
            return None
        pinned, path = file.download(MAX_BYTES)
        try:
            names = _expected(path.parent, _read_mark(path.parent))
        except FileError:  # which `problems` says
            names = FILES
        for name in names:
            replace(pinned, path=name).download(MAX_BYTES)
        return cls(path.parent, f"{pinned.repository}@{pinned.revision}")

    def problems(self) -> list[str]:
        """See `ResultFolder.problems`."""
        try:
            mark = _read_mark(self.path)
        except FileError as error:
            return [str(error)]
        return list(_changed(self.path, mark)) or list(_contradictions(self.path))

    def as_text(self, problems: Sequence[str]) -> str:
        """See `ResultFolder.as_text`."""
        number = sum((self.path / name).exists() for name in FILES)
        belong = f"its {number} files belong together, as {SEARCH} wrote them (which does not say who ran it)"
        return "\n".join([f"folder    {self.name}", *([f"problem: {line}" for line in problems] or [belong])])


def _expected(folder: Path, mark: _Mark) -> tuple[str, ...]:
    """Return the names of the files that a mark promises for a folder: pages may never have been written."""
    pages = any(name in mark.files or (folder / name).exists() for name in PAGES)
    return FILES if pages else (PATTERN, METRICS)


def _read_mark(folder: Path) -> _Mark:
    path = folder / MARK
    if not path.exists():
        raise FileError(f"{folder}: has no {MARK}; expected the output folder of {SEARCH}, or a pattern file")
    try:
        mark = _Mark.model_validate(read_json_object(path, MAX_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise FileError(f"{path}: {where}: {first['msg']}; expected the mark of {SEARCH}") from None
    if mark.command != SEARCH:
        raise FileError(f"{path}: is the mark of {mark.command}, expected that of {SEARCH}")
    return mark


def _changed(folder: Path, mark: _Mark) -> Iterator[str]:
    """Yield a line for each file that is not there, or whose sha256 the mark does not list."""
    for name in _expected(folder, mark):
        path, listed = folder / name, mark.files.get(name)
        try:
            if listed is None or len(listed) != 1:  # a run that was killed may leave two
                raise FileError(f"{path}: {MARK} does not list it, expected its one sha256")
            sha256 = file_digest(path).sha256
            if sha256 not in listed:
                yield f"{path}: was changed since {SEARCH} wrote it: sha256 {sha256[:16]}..., not {listed[0][:16]}..."
        except FileError as error:
            yield str(error)


def _contradictions(folder: Path) -> Iterator[str]:
    """Yield a line for each file that says something else than the pattern file, or that can't be read."""
    try:
        file = PatternFile.load(folder / PATTERN)
        metrics = read_json_object(folder / METRICS, MAX_BYTES)
        if _read(metrics.get("pattern_file"), folder / METRICS) != file:
            yield f"{folder / METRICS}: has another pattern file than {PATTERN}; expected files of one search"
        if not (folder / CARD).exists():
            return
        card = read_regular(folder / CARD, MAX_BYTES).decode(errors="replace")
        for name, sha256 in _digests(file, metrics).items():
            if sha256 not in card:
                yield f"{folder / CARD}: lacks the sha256 of {name}, {sha256[:16]}...; expected files of one search"
    except IndexCacheError as error:
        yield str(error)


def _digests(file: PatternFile, metrics: dict[str, Any]) -> dict[str, str]:
    """Return the digests of model and data that all of the files are about."""
    held_out = metrics.get("held_out")
    found = {
        "config.json": file.model.config_sha256,
        "the model's files": metrics.get("weights_sha256"),
        "the calibration tokens": file.calibration and file.calibration.sha256,
        "the held-out tokens": held_out.get("sha256") if isinstance(held_out, dict) else None,
    }
    return {name: sha256 for name, sha256 in found.items() if isinstance(sha256, str)}


def _read(content: Any, path: Path) -> PatternFile:
    try:
        return PatternFile.model_validate(content)
    except ValidationError:
        raise PatternFileError(f"{path}: pattern_file is no pattern file, expected that of {PATTERN}") from None
