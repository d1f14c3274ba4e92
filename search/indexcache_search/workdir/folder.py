"""A folder whose mark lists the files that a command wrote."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from indexcache_search.errors import FolderError
from indexcache_search.evaluation.records import may_be_sealed
from indexcache_search.workdir.lock import LOCK, locked
from indexcache_search.workdir.mark import NEXT, Holds, Mark, digest_of, unmarked
from sglang_indexcache.io.atomic import write_atomically
from sglang_indexcache.pattern_file.result_folder import MARK

PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial")  # left by a killed `write_atomically`


class OwnFolder:
    """Folder that a command writes files to, leaving everything else in it alone.

    A file is the command's own if the mark names it and its content is unchanged. Any other file belongs to the user,
    and is never overwritten or removed.

    Args:
        path: the folder, created when it is held.
        command: the command that writes.
        names: names of the files that it may write.
        option: the option that names the folder.
        ever: regular expression of the names that it gives in other runs, or gave in earlier versions.

    Attributes:
        written: files of this run, in order.
    """

    def __init__(self, path: Path, command: str, names: Sequence[str], option: str, ever: str = "") -> None:
        self.path, self.command, self.written = path, command, list[Path]()
        self._names, self._option, self._ever = names, option, re.compile(ever)
        self._mark = self._empty = Mark(command=command, holds="files", files={})

    def check(self) -> None:
        """Check that all names are free or the command's own; create nothing.

        Raises:
            FolderError: if another file or folder is in the way, or the mark names files that the command never writes.
        """
        try:
            self._check_all()
        except FolderError:
            self._check_all()  # a run that was writing changes its mark before the file

    def _check_all(self) -> None:
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise FolderError(f"{self._option} is {self.path}, which is no folder")
        self._mark = checked_mark(self.path, self.command, "files", self._option) or self._empty
        for name in self._mark.files:
            if name not in self._names and not self._ever.fullmatch(name):
                raise FolderError(f"{self.path / MARK}: names {name!r}, which {self.command} never writes; {NEXT}")
        for name in dict.fromkeys([*self._names, *self._mark.files]):
            self._check(name)

    @contextmanager
    def held(self) -> Iterator[Self]:
        """Hold the folder as its only writer inside the `with` block.

        Raises:
            FolderError: as `check`, and if another process writes there.
        """
        self.check()
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with locked(self.path, self.command):
                self.check()  # another run may have ended since
                yield self
        finally:
            with suppress(OSError):  # holds something now
                for folder in made:
                    folder.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a whole file, replacing the command's own older one.

        Raises:
            FolderError: if somebody else's is there.
        """
        before = self._check(name)
        new = hashlib.sha256(text.encode()).hexdigest()
        self._record(name, list(dict.fromkeys(filter(None, [before, new]))))
        write_atomically(self.path / name, text)
        if self.path / name not in self.written:
            self.written.append(self.path / name)

    def growing(self, name: str) -> Path:
        """Mark a file that is appended to as the command's own; return its path.

        Raises:
            FolderError: if somebody else's is there.
        """
        self._check(name)
        self._record(name, None)
        return self.path / name

    def clear(self, growing: bool = False) -> list[Path]:
        """Remove the files of earlier runs, with `growing` also those that grow; return their paths.

        Raises:
            FolderError: if one of them was changed since; then none is removed.
        """
        names = [name for name, digests in self._mark.files.items() if growing or digests is not None]
        paths = [self.path / name for name in names if self._check(name) is not None]
        for path in paths:
            path.unlink()
        if names:
            kept = {name: digests for name, digests in self._mark.files.items() if name not in names}
            self._mark = self._empty.model_copy(update={"files": kept})
            self._mark.write(self.path)
        return paths

    def _record(self, name: str, digests: list[str] | None) -> None:
        if self._mark.files.get(name, []) != digests:
            self._mark = self._mark.model_copy(update={"files": {**self._mark.files, name: digests}})
            self._mark.write(self.path)

    def _check(self, name: str) -> str | None:
        """Return the sha256 of the command's own file, empty if it grows; `None` if there is no file."""
        path, mend = self.path / name, f"move it away, or choose another {self._option}"
        if not os.path.lexists(path):
            return None
        if name not in self._mark.files:
            raise unmarked(path, self.command, self._option)
        digests = self._mark.files[name]
        if not stat.S_ISREG(path.lstat().st_mode):
            raise FolderError(f"{path}: not a regular file, but {self.command} wrote one; move it away")
        if digests is None:
            if path.suffix == ".jsonl" and not may_be_sealed(path):
                raise FolderError(f"{path}: is not what {self.command} wrote; {mend}")
            return ""
        digest = digest_of(path)
        if digest not in digests:
            raise FolderError(f"{path}: was changed since {self.command} wrote it; {mend}")
        return digest


def checked_mark(folder: Path, command: str, holds: Holds, option: str) -> Mark | None:
    """Return the mark of `folder`, if there is one.

    Raises:
        FolderError: if it is damaged, or another command's.
    """
    mark = Mark.read(folder)
    if mark is not None and (mark.command, mark.holds) != (command, holds):
        what = "what" if mark.holds == "files" else f"the {mark.holds} that"
        raise FolderError(f"{folder}: holds {what} {mark.command} wrote; choose another {option} for {command}")
    return mark


def check_subfolder(folder: Path, command: str, holds: Holds) -> None:
    """Check that a folder that only `command` may write to is free or its own.

    Raises:
        FolderError: if it is somebody else's.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise FolderError(
            f"{folder}: is no folder, and links are not followed; move it away, or choose another --output"
        )
    left = [path for path in folder.iterdir() if path.name != LOCK and not PARTIAL.fullmatch(path.name)]
    if checked_mark(folder, command, holds, "--output") is None and left:
        raise unmarked(folder, command, "--output")
