"""Folders that are written as a whole, such as an exported model, and that go as a whole."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from indexcache_search.errors import FolderError
from indexcache_search.owned.folder import checked_mark
from indexcache_search.owned.lock import LOCK
from indexcache_search.owned.mark import MARK, Mark, digest_of

UNFINISHED = re.compile(r"unfinished-[0-9a-f]{32}")
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial")  # what a killed `write_atomically` leaves


def is_whole(folder: Path, command: str) -> bool:
    """Whether `folder` holds all that its mark says; `False` too if it is not there.

    Raises:
        FolderError: if it is there and not a run's of `command`.
    """
    mark = _mark(folder, command)
    return mark is not None and all(
        (folder / name).is_file() and digest_of(folder / name) in (digests or ())
        for name, digests in mark.files.items()
    )


def check_ours(folder: Path, command: str) -> None:
    """Check that nothing in `folder` is anybody else's.

    Raises:
        FolderError: naming what is, or was changed.
    """
    mark = _mark(folder, command)
    if mark is None:
        return
    for path, name in _files(folder):
        if name != MARK:
            digests = mark.files.get(name)
            if digests is None or digest_of(path) not in digests:
                raise FolderError(f"{path}: {'is not' if digests is None else 'was changed since it was'} written by"
                                  f" {command}; move it away")  # fmt: skip


@contextmanager
def replaced(folder: Path, work: Path, command: str) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `folder` if the `with` block ends without an error.

    Args:
        folder: our own older one goes.
        work: a folder of ours on the same file system, where it is filled.
        command: that writes.

    Raises:
        FolderError: if what is there is not ours, or not all of it.
    """
    check_ours(folder, command)
    unfinished = work / f"unfinished-{uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        files: dict[str, list[str] | None] = {name: [digest_of(path)] for path, name in _files(unfinished)}
        Mark.new(command, "model", files).write(unfinished)
        discard(folder, work, command)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def discard(folder: Path, work: Path, command: str) -> None:
    """Remove a folder of ours: at once out of sight, so that no half of it looks whole.

    Raises:
        FolderError: if something in it is not ours; then all of it stays.
    """
    check_ours(folder, command)
    if folder.exists():
        gone = work / f"unfinished-{uuid4().hex}"
        folder.rename(gone)
        shutil.rmtree(gone)


def open_subfolder(folder: Path, command: str, holds: str) -> None:
    """Make a folder all of whose content will be ours, or check that it is one.

    Raises:
        FolderError: if it is somebody else's.
    """
    check_subfolder(folder, command, holds)
    folder.mkdir(parents=True, exist_ok=True)
    if Mark.read(folder) is None:
        Mark.new(command, holds, {}).write(folder)  # type: ignore[arg-type]  # one of these


def check_subfolder(folder: Path, command: str, holds: str) -> None:
    """Check that a folder all of whose content will be ours is free, or such a one.

    Raises:
        FolderError: if it is somebody else's.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise FolderError(
            f"{folder}: is no folder, and links are not followed; move it away, or choose another --output"
        )
    left = [path for path in folder.iterdir() if path.name != LOCK and not _PARTIAL.fullmatch(path.name)]
    if checked_mark(folder, command, holds, "--output") is None and left:
        raise _unmarked(folder, command)


def check_content(folder: Path, ours: re.Pattern[str]) -> None:
    """Check that all files of a folder have names that only we give; what is marked within is left to its mark.

    Args:
        folder: any; none is fine.
        ours: matches whole paths below it.

    Raises:
        FolderError: naming the first that has another, or is a link.
    """
    for path, name in _files(folder, UNFINISHED):
        known = name == MARK or ours.fullmatch(name) or _PARTIAL.fullmatch(path.name)
        if path.is_symlink() or not known:
            raise FolderError(f"{path}: not written by us; move it away, or choose another --output")


def empty(folder: Path) -> None:
    """Remove what is in a folder of ours but its mark; check it before."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _mark(folder: Path, command: str) -> Mark | None:
    """The mark of a folder that was written as a whole; `None` if no folder is there."""
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        raise _unmarked(folder, command)
    mark = checked_mark(folder, command, "model", "--output")
    if mark is None:
        raise _unmarked(folder, command)
    return mark


def _unmarked(folder: Path, command: str) -> FolderError:
    return FolderError(
        f"{folder}: is there already, and no {MARK} says that {command} wrote it; move it away, or choose another"
        " --output"
    )


def _files(folder: Path, passed_over: re.Pattern[str] | None = None) -> Iterator[tuple[Path, str]]:
    """All that is in a folder but folders, and their paths below it; links are not followed, and count as files.

    Args:
        folder: any; none is fine.
        passed_over: folders in it that are not looked into.

    Raises:
        OSError: if a folder can't be read.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() or not path.is_dir():
            yield path, path.name
        elif passed_over is None or not passed_over.fullmatch(path.name):
            yield from ((inner, f"{path.name}/{name}") for inner, name in _files(path))
