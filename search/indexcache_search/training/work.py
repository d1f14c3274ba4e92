"""The folders of a run: held by one run at a time, and kept for the same one."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from indexcache_search.errors import JournalError
from indexcache_search.records import check_identity
from indexcache_search.training.processes import Processes
from indexcache_search.training.settings import Folders
from sglang_indexcache.errors import FileError
from sglang_indexcache.files import read_json_object, write_atomically

_MAX_BYTES = 1 << 20


@contextmanager
def work_folder(folders: Folders, identity: Mapping[str, Any], processes: Processes) -> Iterator[None]:
    """Hold the folder of a run inside the `with` block, in all of its processes.

    Args:
        folders: `restart` discards what an earlier run left there.
        identity: what the trained weights depend on; another run's folder is refused.
        processes: all processes of the run.

    Raises:
        JournalError: if the folder belongs to another run, or another process uses it.
    """
    if not processes.first:
        processes.wait()
        yield
        return
    path = folders.work / "run.json"
    folders.work.mkdir(parents=True, exist_ok=True)
    with (folders.output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalError(f"{folders.output}: another run is using this folder") from None
        if folders.restart:
            for folder in (folders.work, folders.model, folders.output / "tensorboard"):
                shutil.rmtree(folder, ignore_errors=True)
            for name in ("curves.svg", "log.jsonl", "metrics.json", "pattern.yaml"):
                (folders.output / name).unlink(missing_ok=True)
        own = json.loads(json.dumps(identity))
        try:
            recorded = read_json_object(path, _MAX_BYTES) if path.is_file() else own
        except FileError as error:
            raise JournalError(f"{error}; --restart discards the run") from None
        check_identity(path, "run", "--output", recorded, own)
        write_atomically(path, json.dumps(own, indent=1) + "\n")
        processes.wait()
        yield
