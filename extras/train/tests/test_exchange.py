"""An export takes the place of an older one: whenever that ends, one of both is there, and whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from indexcache_search.errors import FolderError
from indexcache_train.training import tree
from indexcache_train.training.exchange import exchange

COMMAND = "indexcache-distill"


def export(folder: Path, text: str) -> None:
    with tree.replaced(folder, folder.parent / "work", COMMAND) as new:
        (new / "weights").mkdir()
        for name in ("config.json", "weights/a", "weights/b"):
            (new / name).write_text(text)


def content(folder: Path) -> str:
    assert tree.is_whole(folder, COMMAND)
    [text] = {(folder / name).read_text() for name in ("config.json", "weights/a", "weights/b")}
    return text


def ended_at(folder: Path, step: int, kill: bool) -> bool:
    """Export in another process, which ends at its `step`-th change of a name; true if it came that far."""
    child = os.fork()
    if child == 0:
        steps = 0

        def counted(function: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps == step:
                    if kill:
                        os._exit(9)
                    raise KeyboardInterrupt
                return function(*args, **options)

            return call

        for owner, name in ((Path, "rename"), (shutil, "rmtree"), (tree, "exchange"), (os, "rmdir"), (os, "unlink")):
            setattr(owner, name, counted(getattr(owner, name)))
        try:
            export(folder, "new")
        except BaseException:
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "interrupted"])
def test_an_export_that_ends_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool, kill: bool
) -> None:
    """Before, the old one was removed first: neither was there in between."""
    if not at_once:
        monkeypatch.setattr(tree, "exchange", lambda *_: False)
    found = []
    for step in range(1, 40):
        folder = tmp_path / str(step) / "model"
        folder.parent.mkdir()
        export(folder, "old")
        came_there = ended_at(folder, step, kill)
        if at_once:
            assert folder.is_dir()
        found.append(content(folder))
        if not came_there:
            break
        export(folder, "newer")
        assert content(folder) == "newer"
        assert at_once or not tree._before(folder).exists()
    else:
        pytest.fail("never whole")
    assert found[0] == "old" and found[-1] == "new" and found == sorted(found, reverse=True)


def test_nothing_foreign_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "exchange", lambda *_: False)
    folder = tmp_path / "model"
    export(folder, "old")
    before = tree._before(folder)
    before.mkdir()
    (before / "mine").write_text("mine")
    with pytest.raises(FolderError, match=r"\.model\.before: is there already"):
        export(folder, "new")
    shutil.copy(folder / "indexcache-run.json", before)
    with pytest.raises(FolderError, match="mine: is not written by"):
        export(folder, "new")
    assert content(folder) == "old" and (before / "mine").read_text() == "mine"


def test_two_folders_change_names(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("not known to this file system")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "none")
