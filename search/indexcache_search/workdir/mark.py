"""The mark of a folder: the command that wrote it, and the files that are the command's own."""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from indexcache_search.errors import FolderError
from sglang_indexcache.io.atomic import opened, read_regular, write_atomically
from sglang_indexcache.io.errors import FileError
from sglang_indexcache.pattern_file.result_folder import MARK
from sglang_indexcache.version import version

Holds = Literal["files", "model", "work", "events"]
"""`files`: the files it names. `model`: the same, written as a whole. `work`, `events`: files of a training run."""
_MAX_BYTES = 16 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Mark(BaseModel):
    """Contents of a mark.

    Attributes:
        command: the command that wrote the folder.
        version: version of this package.
        created: start of the command, UTC.
        holds: purpose of the folder.
        files: paths below the folder, with the sha256 of their content; two where a kill may have left either one;
            `None` for files that grow.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)

    schema_: Literal["indexcache-run/v1"] = Field(default="indexcache-run/v1", alias="schema")
    command: str
    version: str = Field(default_factory=version)
    created: str = Field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    holds: Holds
    files: dict[str, list[str] | None]

    @model_validator(mode="after")
    def _is_a_mark(self) -> Self:
        for name, digests in self.files.items():
            if self.holds not in ("files", "model") or not _is_below(name) or (self.holds == "files" and "/" in name):
                raise ValueError(f"names {name!r}, which no command writes there")
            if digests is not None and not all(_DIGEST.fullmatch(digest) for digest in digests):
                raise ValueError(f"{name}: no sha256")
        return self

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the mark of `folder`; return `None` if it has none.

        Raises:
            FolderError: if it can't be read or is damaged, so that ownership of files is unknown.
        """
        path = folder / MARK
        if not os.path.lexists(path):
            return None
        try:
            if path.is_symlink():
                raise FileError(f"{path}: is a link")
            mark = cls.model_validate_json(read_regular(path, _MAX_BYTES))
            if "schema_" not in mark.model_fields_set:
                raise FileError(f"{path}: schema is missing")
            return mark
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise FolderError(f"{path}: {where and where + ': '}{first['msg']}; {NEXT}") from None
        except FileError as error:
            raise FolderError(f"{error}; {NEXT}") from None

    def write(self, folder: Path) -> None:
        """Write the mark into `folder` atomically."""
        write_atomically(folder / MARK, self.model_dump_json(by_alias=True, indent=1) + "\n")


NEXT = "nothing here is touched without a whole mark; move the folder away, or choose another"


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    plain = str(path) == name != "." and ".." not in path.parts and not path.is_absolute()
    return plain and not {"\0", "\\"} & {*name}


def unmarked(path: Path, command: str, option: str) -> FolderError:
    """Return the error for a file or folder that no mark names."""
    return FolderError(
        f"{path}: is there already, and no {MARK} says that {command} wrote it; move it away, or choose another"
        f" {option}"
    )


def digest_of(path: Path) -> str:
    """Return the sha256 of a regular file.

    Raises:
        FileError: if it is a link, not a regular file, or can't be read.
    """
    if path.is_symlink():
        raise FileError(f"{path}: is a link")
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
