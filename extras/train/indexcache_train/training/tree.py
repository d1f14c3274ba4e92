"""Folders that are written and removed as a whole, such as an exported model."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from indexcache_search.errors import FolderError
from indexcache_search.workdir.folder import PARTIAL, check_subfolder, checked_mark
from indexcache_search.workdir.mark import Holds, Mark, digest_of, unmarked
from indexcache_train.training.exchange import exchange
from sglang_indexcache.pattern_file.result_folder import MARK

UNFINISHED = re.compile(r"unfinished-[0-9a-f]{32}")


def is_whole(folder: Path, command: str) -> bool:
    """Return true if `folder` exists and holds every file of its mark, unchanged.

    Raises:
        FolderError: if it exists but `command` did not write it.
    """
    _put_back(folder)
    mark = _mark(folder, command)
    return mark is not None and all(
        (folder / name).is_file() and digest_of(folder / name) in (digests or ())
        for name, digests in mark.files.items()
    )


def check_ours(folder: Path, command: str) -> None:
    """Check that `command` wrote every file in `folder`.

    Raises:
        FolderError: naming the first foreign or changed file.
    """
    mark = _mark(folder, command)
    if mark is None:
        return
    for path, name in _files(folder):
        digests = mark.files.get(name)
        if name != MARK and (digests is None or digest_of(path) not in digests):
            found = "is not" if digests is None else "was changed since it was"
            raise FolderError(f"{path}: {found} written by {command}; move it away")


@contextmanager
def replaced(folder: Path, work: Path, command: str) -> Iterator[Path]:
    """Yield an empty folder to fill; replace `folder` with it if the `with` block succeeds.

    Whenever this ends, by a kill too, the old folder or the new one is there, and whole.

    Args:
        folder: the target, whose own older version is removed once the new one stands.
        work: an own folder on the same file system, for the new version.
        command: the command that writes.

    Raises:
        FolderError: if `folder` holds anything that `command` did not write.
    """
    _put_back(folder)
    check_ours(folder, command)
    before = _before(folder)
    unfinished = work / f"unfinished-{uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        files: dict[str, list[str] | None] = {name: [digest_of(path)] for path, name in _files(unfinished)}
        Mark(command=command, holds="model", files=files).write(unfinished)
        check_ours(folder, command)
        if not folder.exists():
            unfinished.rename(folder)
        elif exchange(unfinished, folder):
            shutil.rmtree(unfinished)  # the old one now
        else:
            discard(before, work, command)
            folder.rename(before)
            try:
                unfinished.rename(folder)
            finally:
                _put_back(folder)
            discard(before, work, command)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _put_back(folder: Path) -> None:
    """Put back an own folder that a killed exchange had moved away."""
    before = _before(folder)
    if not os.path.lexists(folder) and before.is_dir() and Mark.read(before) is not None:
        before.rename(folder)


def _before(folder: Path) -> Path:
    """Return where the old folder is while the new one takes its place, if both can't be exchanged in one step."""
    return folder.with_name(f".{folder.name}.before")


def discard(folder: Path, work: Path, command: str) -> None:
    """Remove an own folder: rename it first, so that a half-removed one never looks whole.

    Raises:
        FolderError: if it holds a foreign file; then all of it stays.
    """
    check_ours(folder, command)
    if folder.exists():
        gone = work / f"unfinished-{uuid4().hex}"
        folder.rename(gone)
        shutil.rmtree(gone)


def open_subfolder(folder: Path, command: str, holds: Holds) -> None:
    """Create a folder that only `command` writes to, or check that it is one.

    Raises:
        FolderError: if it is somebody else's.
    """
    check_subfolder(folder, command, holds)
    folder.mkdir(parents=True, exist_ok=True)
    if Mark.read(folder) is None:
        Mark(command=command, holds=holds, files={}).write(folder)


def check_content(folder: Path, ours: re.Pattern[str]) -> None:
    """Check that all files of a folder have names that only this package gives.

    Args:
        folder: the folder; may be missing.
        ours: pattern of whole paths below it.

    Raises:
        FolderError: naming the first file with another name, or the first link.
    """
    for path, name in _files(folder):
        unfinished = "/" in name and UNFINISHED.fullmatch(name.partition("/")[0])
        known = name == MARK or ours.fullmatch(name) or PARTIAL.fullmatch(path.name)
        if not unfinished and (path.is_symlink() or not known):
            raise FolderError(f"{path}: not written by us; move it away, or choose another --output")


def empty(folder: Path) -> None:
    """Remove everything but the mark from an own folder that was checked before."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _mark(folder: Path, command: str) -> Mark | None:
    if not os.path.lexists(folder):
        return None
    is_folder = folder.is_dir() and not folder.is_symlink()
    mark = checked_mark(folder, command, "model", "--output") if is_folder else None
    if mark is None:
        raise unmarked(folder, command, "--output")
    return mark


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield all files in a folder, if there is one, and their paths below it; links count as files."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() or not path.is_dir():
            yield path, path.name
        else:
            yield from ((inner, f"{path.name}/{name}") for inner, name in _files(path))
