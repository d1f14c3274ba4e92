"""The sha256 of a whole file; that of a large one is kept in the user's cache while the file stays the same."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from threading import Event
from typing import Any, Self, TypeVar

from sglang_indexcache.io.atomic import opened
from sglang_indexcache.io.errors import FileError

CHUNK = 8 << 20
_REMEMBERED_FROM = 32 << 20  # a smaller file is read again in less time than a person notices
_SETTLED_NS = 2_000_000_000  # times of some file systems are this coarse: a younger file may change without a trace
_THREADS = 8
_PAUSE = 0.2

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Stamp:
    """The facts by which a file that was written to is recognised without reading it.

    The time of the last change of its inode is among them: writers can set the other time back, but not this one.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Take the stamp from the status of a file."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class Digest:
    """The sha256 of a file's bytes, in hex, and the file's stamp when they were read."""

    sha256: str
    stamp: Stamp


def file_digest(path: Path, stop: Event | None = None) -> Digest:
    """Digest all bytes of a regular file, or return the remembered digest if the file is unchanged.

    Args:
        path: links are followed.
        stop: ends the reading when it is set, for a caller that no longer needs the digest.

    Raises:
        FileError: if it can't be read, is not a regular file, or changes meanwhile.
    """
    with opened(path) as file:
        stamp, began = Stamp.of(os.fstat(file.fileno())), time.time_ns()
        settled = began - max(stamp.modified_ns, stamp.changed_ns) > _SETTLED_NS
        with _entry(path, stop) if settled and stamp.size >= _REMEMBERED_FROM else nullcontext() as entry:
            known = _recall(entry, stamp)
            if known is not None:
                return Digest(known, stamp)
            digest = hashlib.sha256()
            while content := file.read(CHUNK):
                digest.update(content)
                _check_wanted(stop)
            check_same(file, path, stamp)
            _remember(entry, stamp, digest.hexdigest())
            return Digest(digest.hexdigest(), stamp)


def check_same(file: FileIO, path: Path, stamp: Stamp) -> None:
    """Check that nobody wrote to an open file since it had `stamp`.

    Raises:
        FileError: if somebody did.
    """
    if Stamp.of(os.fstat(file.fileno())) != stamp:
        raise FileError(f"{path}: changed while it was read; expected a file that nobody writes to")


def side_by_side(work: Callable[[Path, Event], _Result], paths: Iterable[Path]) -> list[_Result]:
    """Return the result of `work` for each path, some at a time; an error or an interrupt sets the others' event."""
    stop = Event()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        try:
            return list(pool.map(lambda path: work(path, stop), paths))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_wanted(stop: Event | None) -> None:
    if stop is not None and stop.is_set():
        raise FileError("nobody waits for this file any more")


@contextmanager
def _entry(path: Path, stop: Event | None) -> Iterator[FileIO | None]:
    """Open the cache entry of `path`, for this process alone; `None` without a folder that is only this user's."""
    try:
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        descriptor = os.open(_folder() / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (OSError, RuntimeError):
        yield None
        return
    with FileIO(descriptor, "r+b") as entry:  # processes that need the same digest wait for the one that reads
        yield entry if os.fstat(descriptor).st_uid == os.geteuid() and _lock(descriptor, stop) else None


def _lock(descriptor: int, stop: Event | None) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            _check_wanted(stop)
            time.sleep(_PAUSE)
        except OSError:  # a file system without locks
            return False


def _folder() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (given if given.is_absolute() else Path.home() / ".cache") / "sglang_indexcache" / "digests"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def _recall(entry: FileIO | None, stamp: Stamp) -> str | None:
    """Return the digest in `entry`, if the entry is whole and has this stamp."""
    try:
        line, _, seal = (b"" if entry is None else entry.read(4096)).partition(b"\n")
        if seal.decode() == hashlib.sha256(line).hexdigest():
            found: Any = json.loads(line)
            return str(found["sha256"]) if found["stamp"] == asdict(stamp) else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _remember(entry: FileIO | None, stamp: Stamp, sha256: str) -> None:
    """Write the entry, under its lock; a full disk leaves an entry that is not whole, which counts as none."""
    if entry is None:
        return
    try:
        entry.seek(0)
        entry.truncate()
        line = json.dumps({"stamp": asdict(stamp), "sha256": sha256}).encode()
        entry.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode())
    except OSError:
        pass
