"""Folders of training runs as people leave them: runs go on, discard and write their own things alone."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from indexcache_search.errors import FolderError, JournalError
from indexcache_search.workdir.lock import LOCK
from indexcache_train.training import tree
from indexcache_train.training.folders import HeldFolders, check_folders, held_folders
from indexcache_train.training.processes import Processes
from indexcache_train.training.sets import TrainingData
from indexcache_train.training.settings import Folders
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.pattern_file.result_folder import MARK
from tests.search.test_ownership import COMMAND, names_in, snapshot

ALONE = Processes(0, 1, None, False)  # type: ignore[arg-type]  # no device is needed


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Begins a run in tmp_path/"out"."""
    (tmp_path / "data.jsonl").write_text("{}\n")
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here loses its power
    sources = (str(tmp_path / "data.jsonl"),)
    data = TrainingData(training=sources, evaluation=(), seq_len=1, num_sequences=1, num_eval_sequences=1)

    @contextmanager
    def begun(restart: bool = False, **more: Any) -> Iterator[HeldFolders]:
        folders = Folders(tmp_path / "out", restart)
        check_folders(folders, data.reads("owner/name"))
        with held_folders(folders, data, more, ALONE) as work:
            yield work

    return begun


def complete(work: HeldFolders) -> None:
    """Everything that a run leaves."""
    folders = work.paths
    with closing(work.log(0, tensorboard=False)) as log:
        log.add({"step": 1})
    tree.open_subfolder(folders.events, folders.command, "events")
    (folders.events / "events.out.tfevents.1").write_bytes(b"event")
    step = folders.work / "checkpoints" / "step-000001"
    step.mkdir(parents=True, exist_ok=True)
    for name in ("process-0.safetensors", "process-0.json", "checkpoint.json"):
        (step / name).write_text(name)
    for folder in (folders.warmed_up, folders.model):
        with work.exported(folder) as unfinished:
            (unfinished / "heads").mkdir()
            for name in ("config.json", "model.safetensors", "heads/heads.safetensors"):
                (unfinished / name).write_text(name)
    work.write(dict.fromkeys(("metrics.json", "curves.svg", "pattern.yaml"), "result"))


def test_restart_discards_what_a_run_left(tmp_path: Path, run: Callable[..., Any]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with run() as work:
        complete(work)
    with run() as work:
        assert work.is_whole(work.paths.model, ALONE)
    with pytest.raises(JournalError, match="belongs to a run with lr None, now it is 1"), run(lr=1):
        pass
    with run(restart=True, lr=1):
        left = snapshot(tmp_path / "out")
    assert sorted(left) == sorted(
        [LOCK, MARK, "notes.txt", "tensorboard", f"tensorboard/{MARK}", "work", f"work/{MARK}", "work/run.json"]
    )


@pytest.mark.parametrize(
    "name", ["model/README.md", "work/notes.txt", "tensorboard/mine.txt", "work/checkpoints/x/y", "work/warmed-up/a"]
)
def test_restart_takes_nothing_of_anybody_elses(tmp_path: Path, run: Callable[..., Any], name: str) -> None:
    with run() as work:
        complete(work)
    (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / name).write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(FolderError, match=f"{name}: .*move it away"), run(restart=True):
        pass
    assert snapshot(tmp_path) == before
    with run() as work:  # going on touches none of that
        assert work.is_whole(work.paths.model, ALONE)


@pytest.mark.parametrize(
    "name", ["model", "work", "tensorboard", "metrics.json", "curves.svg", "pattern.yaml", "log.jsonl"]
)
@pytest.mark.parametrize("restart", [False, True])
def test_folders_and_files_of_people_are_in_the_way(
    tmp_path: Path, run: Callable[..., Any], name: str, restart: bool
) -> None:
    path = tmp_path / "out" / name
    (path.parent if path.suffix else path).mkdir(parents=True)
    (path if path.suffix else path / "mine").write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(FolderError, match=f"{name}: is there already|{name}: holds"), run(restart):
        pass
    assert snapshot(tmp_path) == before


def test_a_model_with_something_missing_is_not_whole(tmp_path: Path, run: Callable[..., Any]) -> None:
    with run() as work:
        complete(work)
        folder = work.paths.model
        (folder / "model.safetensors").unlink()
        assert not work.is_whole(folder, ALONE)
        with work.exported(folder) as unfinished:
            (unfinished / "config.json").write_text("new")
        assert work.is_whole(folder, ALONE) and names_in(folder) == ["config.json", MARK]
        (folder / "config.json").write_text("edited")
        with pytest.raises(FolderError, match=r"config\.json: was changed since it was written"):
            work.exported(folder).__enter__()
        assert (folder / "config.json").read_text() == "edited"


def test_an_export_that_is_cut_off_anywhere_is_never_half(
    tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the nth change of the disk: the old model is there as it was, or none, or the new one."""
    texts = {"old": "old config", "new": "new config"}

    def export(work: HeldFolders, text: str) -> None:
        with work.exported(work.paths.model) as unfinished:
            (unfinished / "config.json").write_text(texts[text])
            (unfinished / "weights").write_text(texts[text])

    for number in range(40):
        with run() as work:
            export(work, "old")
        calls = [0]

        def killed(real: Callable[..., Any], calls: list[int] = calls, number: int = number) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                calls[0] += 1
                if calls[0] > number:  # what is dead changes nothing any more
                    raise KeyboardInterrupt
                return real(*args, **more)

            return call

        ended = True
        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "unlink", "mkdir", "rmdir"):
                patch.setattr(os, name, killed(getattr(os, name)))
            patch.setattr(shutil, "rmtree", killed(shutil.rmtree))
            try:
                with run() as work:
                    export(work, "new")
            except KeyboardInterrupt:
                ended = False
        folder = tmp_path / "out" / "model"
        if folder.exists():
            assert tree.is_whole(folder, COMMAND)
            assert len({(folder / name).read_text() for name in ("config.json", "weights")}) == 1
        if ended:
            assert number > 5 and (folder / "config.json").read_text() == "new config"
            break
        with run() as work:
            assert not list(work.paths.work.glob("unfinished-*"))
    else:
        pytest.fail("it never ended")


def test_nothing_of_anybody_elses_is_lost(tmp_path: Path, run: Callable[..., Any]) -> None:
    """Random folders of a run with people's files, links and changes in them, and all that runs do to folders."""
    rng, outside, counts = random.Random(0), tmp_path / "outside", {"went on": 0, "refused": 0}
    for number in range(60):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(outside, ignore_errors=True)
        (outside / "deep").mkdir(parents=True)
        for name in ("file", "deep/metrics.json", "deep/config.json"):
            (outside / name).write_text(f"outside {name}")
        out = tmp_path / "out"
        if rng.random() < 0.7:
            with run() as work:
                complete(work)
        out.mkdir(exist_ok=True)
        theirs = [left for _ in range(rng.randint(0, 4)) if (left := _leave_something(rng, out, outside)) is not None]
        kept = {path: _content(path) for path in theirs if os.path.lexists(path)}
        before = snapshot(outside)
        for _ in range(2):
            try:
                with run(restart=rng.random() < 0.5) as work:
                    complete(work)
                counts["went on"] += 1
            except (IndexCacheError, OSError):
                counts["refused"] += 1
            assert snapshot(outside) == before, number
            for path, content in kept.items():
                assert os.path.lexists(path) and _content(path) == content, (number, path)
    assert min(counts.values()) > 20, counts


def _content(path: Path) -> Any:
    if path.is_symlink():
        return str(path.readlink())
    return snapshot(path) if path.is_dir() else path.read_bytes()


def _leave_something(rng: random.Random, out: Path, outside: Path) -> Path | None:
    """Do something that people do to a folder; the path that must stay as it is now."""
    folders = [out, *(path for path in sorted(out.rglob("*")) if path.is_dir() and not path.is_symlink())]
    folder = rng.choice(folders)
    names = [
        "notes.txt",
        "README.md",
        "metrics.json",
        "model",
        "work",
        "tensorboard",
        "warmed-up",
        "partial",
        "config.json",
    ]
    path = folder / rng.choice([*names, "log.jsonl", LOCK, "pattern.yaml", "data", "heads"])
    files = [file for file in sorted(out.rglob("*")) if file.is_file() and not file.is_symlink()]
    choice = rng.randrange(6)
    if choice == 0 and files:  # one of ours is changed
        file = rng.choice(files)
        if file.name == MARK:  # torn, or forged
            text = file.read_text()
            forged = text.replace("metrics.json", "../outside/file").replace("config.json", "../../outside/file")
            file.write_text(rng.choice([text[: rng.randrange(len(text))], forged]))
            return None
        if file.is_relative_to(out / "work") and not file.is_relative_to(out / "work" / "warmed-up"):
            return None  # known by their names
        file.write_text("changed by somebody")
        return None if file.parent.name == "tensorboard" else file
    if choice == 1 and files:  # a mark is gone
        marks = [file for file in files if file.name == MARK]
        if marks:
            mark = rng.choice(marks)
            mark.unlink()
            return None
    if os.path.lexists(path):
        return None
    if choice == 2:
        path.symlink_to(rng.choice([outside, outside / "file", outside / "deep", out, path]))
    elif choice == 3:
        path.mkdir()
        (path / rng.choice(["mine", "config.json", "metrics.json"])).write_text("mine")
    else:
        path.write_text("mine")
    return path
