"""Lock that gives a folder a single writer, ends with its process, and names its holder."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from indexcache_search.errors import FolderError
from sglang_indexcache.io.atomic import reason

LOCK = ".indexcache-lock"
_MAX_BYTES = 4096


class _Holder(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    command: str
    process: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"{self.command} is using this folder: process {self.process} on {self.host}, since {self.since}"


@contextmanager
def locked(folder: Path, command: str) -> Iterator[None]:
    """Hold `folder` as its only writer inside the `with` block; ignore a lock left by a killed process.

    On NFS the lock holds for all hosts if the server keeps locks (Linux maps flock to them).

    Raises:
        FolderError: if another process, which it names, writes there, or the file system has no locks.
    """
    path = folder / LOCK
    with os.fdopen(_taken(path), "wb", buffering=0) as file:
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            holder = _Holder(command=command, process=os.getpid(), host=socket.gethostname(), since=since)
            file.truncate(0)
            file.write(holder.model_dump_json().encode())
            yield
        finally:
            with suppress(OSError):
                path.unlink()  # while held, so that a process that has opened it sees that it is gone


def _taken(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FolderError(f"{path}: not a regular file, expected no such file, or the lock of a run")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = _holder(descriptor) or "another process is using this folder"
                raise FolderError(f"{path.parent}: {holder}; wait for it, or choose another folder") from None
            except OSError as error:
                raise FolderError(f"{path}: {reason(error)}; expected a file system that has locks") from None
            if _is_at(path, descriptor):
                if os.fstat(descriptor).st_size and _holder(descriptor) is None:
                    raise FolderError(f"{path}: is no lock of ours, expected no such file, or the lock of a run")
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has ended and removed the file


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False


def _holder(descriptor: int) -> _Holder | None:
    try:
        return _Holder.model_validate_json(os.pread(descriptor, _MAX_BYTES, 0))
    except ValidationError:
        return None
