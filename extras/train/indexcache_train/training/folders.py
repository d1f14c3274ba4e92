"""The folders of a run: held by one process group at a time, and reused only by the same run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from indexcache_search.errors import JournalError
from indexcache_search.evaluation.records import check_identity
from indexcache_search.workdir.folder import OwnFolder, check_subfolder
from indexcache_search.workdir.overlap import check_apart
from indexcache_train.training import tree
from indexcache_train.training.log import TrainingLog
from indexcache_train.training.processes import Processes
from indexcache_train.training.sets import TrainingData
from indexcache_train.training.settings import Folders
from sglang_indexcache.io.atomic import read_json_object, write_atomically
from sglang_indexcache.io.errors import FileError

RESULTS = ("metrics.json", "curves.svg", "pattern.yaml")
LOG = "log.jsonl"
_MAX_BYTES = 1 << 20
_WORK = re.compile(
    r"run\.json|data/(training|held-out)/((tokens|scored|source_of|prompt|starts)\.npy|set\.json)|(converted|warmed-up)/.+"
    r"|checkpoints/(partial|step-\d{6,})/(process-\d+\.(safetensors|json)|checkpoint\.json)"
)
_EVENTS = re.compile(r"events\.out\.tfevents\.[^/]+")


@dataclass(frozen=True)
class HeldFolders:
    """The folders of a run while it holds them.

    Attributes:
        paths: of all of them.
        results: the files in the output folder.
        identity: inputs of the trained weights, with digests of the data when the run began; empty in all processes but
            the first.
    """

    paths: Folders
    results: OwnFolder
    identity: Mapping[str, Any]

    def log(self, done: int, tensorboard: bool) -> TrainingLog:
        """Open the run's log, from step `done` on."""
        paths = self.paths
        if tensorboard:
            tree.open_subfolder(paths.events, paths.command, "events")
        return TrainingLog(self.results.growing(LOG), done, paths.events if tensorboard else None)

    @contextmanager
    def exported(self, folder: Path) -> Iterator[Path]:
        """Yield an empty folder for a checkpoint, which replaces `folder` when the `with` block has ended.

        Raises:
            FolderError: if `folder` holds foreign files.
        """
        with tree.replaced(folder, self.paths.work, self.paths.command) as unfinished:
            yield unfinished
        if folder == self.paths.model:
            self.results.written.append(folder)

    def is_whole(self, folder: Path, processes: Processes) -> bool:
        """Return true if a complete checkpoint is in `folder`."""
        [whole, *_] = processes.gather(processes.first and tree.is_whole(folder, self.paths.command))
        return bool(whole)

    def write(self, texts: Mapping[str, str]) -> None:
        """Write results, and remove all earlier ones."""
        self.results.clear()
        for name, text in texts.items():
            self.results.write(name, text)


@contextmanager
def held_folders(
    folders: Folders, data: TrainingData, settings: Mapping[str, Any], processes: Processes
) -> Iterator[HeldFolders]:
    """Hold the folder of a run inside the `with` block, in all of its processes; the first one writes to it.

    Args:
        folders: checked by `check_folders`; with `restart` the results of an earlier run are discarded.
        data: sources of the run.
        settings: the other inputs of the trained weights; the folder of another run is refused.
        processes: all processes of the run.

    Raises:
        FolderError: if there are foreign files, or another process writes there.
        JournalError: if the folder belongs to another run.
    """
    results = _results(folders)
    if not processes.first:
        processes.wait()
        yield HeldFolders(folders, results, {})
        return
    path = folders.work / "run.json"
    with results.held():
        tree.open_subfolder(folders.work, folders.command, "work")
        if folders.restart:
            results.clear(growing=True)
            tree.discard(folders.model, folders.work, folders.command)
            tree.empty(folders.work)
            tree.empty(folders.events)
        for left in folders.work.iterdir():
            if tree.UNFINISHED.fullmatch(left.name) and not left.is_symlink():
                shutil.rmtree(left)
        identity = json.loads(json.dumps({**settings, **asdict(data), **data.contents()}))
        try:
            recorded = read_json_object(path, _MAX_BYTES) if path.is_file() else identity
        except FileError as error:
            raise JournalError(f"{error}; --restart discards the run") from None
        check_identity(path, "run", "--output", recorded, identity)
        write_atomically(path, json.dumps(identity, indent=1) + "\n")
        processes.wait()
        yield HeldFolders(folders, results, identity)


def check_folders(folders: Folders, reads: Mapping[str, Iterable[str]]) -> None:
    """Check, before anything is created, that outputs are free or this command's own, and apart from the inputs.

    Args:
        folders: output folders.
        reads: inputs by option, for `check_apart`.

    Raises:
        FolderError: naming the obstacle.
    """
    names = [*(folders.output / name for name in (*RESULTS, LOG)), folders.work, folders.model, folders.events]
    check_apart({"--output": folders.output}, names, reads)
    _results(folders).check()
    check_subfolder(folders.work, folders.command, "work")
    check_subfolder(folders.events, folders.command, "events")
    for folder in (folders.model, folders.converted, folders.warmed_up):
        if folders.restart or not tree.is_whole(folder, folders.command):
            tree.check_ours(folder, folders.command)
    if folders.restart:
        tree.check_content(folders.work, _WORK)
        tree.check_content(folders.events, _EVENTS)


def _results(folders: Folders) -> OwnFolder:
    return OwnFolder(folders.output, folders.command, (*RESULTS, LOG), "--output")
