"""Folders that commands write to: what is not their own stays, one writes at a time, and nothing is left half done."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexcache_harness.comparison import FILES as HARNESS
from indexcache_search.errors import FolderError, SearchError
from indexcache_search.eval.result import FILES, ever
from indexcache_search.results.names import unique_names
from indexcache_search.workdir import folder as owned_folder
from indexcache_search.workdir.folder import OwnFolder
from indexcache_search.workdir.lock import LOCK, locked
from indexcache_search.workdir.outputs import outputs
from indexcache_search.workdir.overlap import check_apart
from sglang_indexcache.io.atomic import write_atomically
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.pattern_file.result_folder import MARK

COMMAND = "indexcache-distill"
NAMES = ("metrics.json", "pattern.yaml")


def own(path: Path, command: str = COMMAND, names: Any = NAMES) -> OwnFolder:
    return OwnFolder(path, command, names, "--output")


def snapshot(folder: Path) -> dict[str, bytes | str | None]:
    """Everything in a folder: contents of files, targets of links, and folders."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        link, name = path.is_symlink(), path.relative_to(folder).as_posix()
        found[name] = str(path.readlink()) if link else path.read_bytes() if path.is_file() else None
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- files


def test_a_run_writes_again_what_it_wrote(tmp_path: Path) -> None:
    """Beside what people have there, in a copy too, and only what was written now is said to be."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    for text in ("one", "two"):
        with own(tmp_path / "out").held() as folder:
            assert folder.clear() == ([] if text == "one" else [tmp_path / "out" / name for name in NAMES])
            folder.write("metrics.json", text)
            assert folder.written == [tmp_path / "out" / "metrics.json"]
            folder.write("pattern.yaml", text)
            folder.write("pattern.yaml", text + text)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    with own(tmp_path / "copy").held() as folder:
        folder.write("metrics.json", "three")
    assert (tmp_path / "copy" / "thesis.tex").read_text() == "mine"
    assert json.loads((tmp_path / "out" / MARK).read_text())["command"] == COMMAND
    with pytest.raises(FolderError, match=f"holds what {COMMAND} wrote; choose another --output for indexcache-eval"):
        own(tmp_path / "out", "indexcache-eval").check()


def test_files_of_other_runs_are_the_commands_own_and_no_others(tmp_path: Path) -> None:
    """Such as a harness's, where losses are compared now; each command says its own names."""
    out = tmp_path / "out"
    with OwnFolder(out, "indexcache-eval", HARNESS, "--output", ever()).held() as folder:
        folder.write("harness.json", "{}")
        folder.growing("lm-eval.log").write_text("asked")
    with outputs("indexcache-eval", out, out, FILES, {}, ever=ever()) as found:
        assert found.results.clear() == [out / "harness.json"]
        found.results.write("eval.json", "{}")
        found.journal()
    with outputs("indexcache-eval", out, out / "work", FILES, {}, ever=ever()) as found:  # the journal was in `out`
        found.results.write("eval.json", "{}")
    mark = json.loads((out / MARK).read_text())
    for name in ("thesis.tex", "metrics.json", "../out/eval.json", "a/eval.json", "", "."):
        (out / MARK).write_text(json.dumps({**mark, "files": {**mark["files"], name: None}}))
        for own_folder in (OwnFolder(out, "indexcache-eval", FILES, "--output", ever()), own(out, "indexcache-eval")):
            with pytest.raises(FolderError, match=rf"names '{re.escape(name)}', which .* writes there|never writes"):
                own_folder.check()


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", ["file", "changed", "folder", "link", "loop", "pipe"])
def test_what_is_not_ours_stays(tmp_path: Path, kind: str, marked: bool) -> None:
    out, other = tmp_path / "out", tmp_path / "other.json"
    other.write_text("theirs")
    out.mkdir()
    if marked:
        with own(out).held() as folder:
            folder.write("pattern.yaml", "ours")
            if kind == "changed":
                folder.write("metrics.json", "ours")
    path = out / "metrics.json"
    path.unlink(missing_ok=True)
    if kind in ("file", "changed"):
        path.write_text("theirs")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(other if kind == "link" else path)
    names, mode = names_in(out), path.lstat().st_mode
    for action in (OwnFolder.check, lambda item: item.held().__enter__(), lambda item: item.write(path.name, "x")):
        with pytest.raises(FolderError, match=r"metrics\.json: "):
            action(own(out))
    assert names_in(out) == names and path.lstat().st_mode == mode and other.read_text() == "theirs"


def test_results_that_were_changed_keep_all_of_them(tmp_path: Path) -> None:
    with own(tmp_path).held() as folder:
        for name in NAMES:
            folder.write(name, "ours")
        (tmp_path / "pattern.yaml").write_text("reviewed, with a comment")
        before = snapshot(tmp_path)
        with pytest.raises(FolderError, match=r"pattern\.yaml: was changed since indexcache-distill wrote it"):
            folder.clear()
        assert snapshot(tmp_path) == before


def test_a_folder_that_is_a_file_or_goes_nowhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FolderError, match=f"--output is .*{name}, which is no folder"):
            own(tmp_path / name).check()


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), own(tmp_path / "a" / "b").held():
        assert (tmp_path / "a" / "b" / LOCK).exists()
        raise RuntimeError
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("metrics.json", "../metrics.json"),
        lambda text: text.replace("metrics.json", "/etc/hosts"),
        lambda text: text.replace("metrics.json", "thesis.tex"),
        lambda text: text.replace("metrics.json", "./metrics.json"),
        lambda text: text.replace('"files",', '"model",').replace("metrics.json", "a/../../b"),
        lambda text: text.replace("/v1", "/v2"),
        lambda text: text.replace('"holds"', '"more": 1, "holds"'),
        lambda text: text.replace(text[text.index('"metrics') :][:90].split('"')[3], "0" * 63),
    ],
)
def test_a_damaged_or_forged_mark_marks_nothing(tmp_path: Path, change: Callable[[str], str]) -> None:
    with own(tmp_path / "out").held() as folder:
        folder.write("metrics.json", "ours")
    (tmp_path / "metrics.json").write_text("ours")
    path = tmp_path / "out" / MARK
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    before = snapshot(tmp_path)
    for action in (OwnFolder.check, OwnFolder.clear, lambda item: item.held().__enter__()):
        item = own(tmp_path / "out")
        if action is OwnFolder.clear:
            assert action(item) == []
        else:
            with pytest.raises(FolderError, match="nothing here is touched without a whole mark"):
                action(item)
    assert snapshot(tmp_path) == before


def test_a_mark_is_not_read_through_a_link(tmp_path: Path) -> None:
    with own(tmp_path / "ours").held() as folder:
        folder.write("metrics.json", "ours")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "metrics.json").write_text("ours")
    (tmp_path / "theirs" / MARK).symlink_to(tmp_path / "ours" / MARK)
    with pytest.raises(FolderError, match="is a link"):
        own(tmp_path / "theirs").check()


def test_a_kill_between_mark_and_file_is_no_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark says first what will be written: the old file is ours as well as the new one."""
    with own(tmp_path).held() as folder:
        folder.write("metrics.json", "old")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owned_folder, "write_atomically", interrupt)
            folder.write("metrics.json", "new")
    for text in ("newer", "newest"):
        with own(tmp_path).held() as folder:
            folder.write("metrics.json", text)
    assert (tmp_path / "metrics.json").read_text() == "newest"


def full(*_: Any) -> None:
    raise OSError(28, "No space left")


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_files_that_grow(tmp_path: Path) -> None:
    """A log is ours as long as it can be one of ours: also damaged or cut, for --restart discards those."""
    sealed = b'{"step": 1, "check": "0123456789abcdef"}\n'
    with own(tmp_path, names=["log.jsonl"]).held() as folder:
        path = folder.growing("log.jsonl")
        for content, ours in (
            (b"", True),
            (b'{"step": 1, "che', True),
            (sealed, True),
            (b"{damaged\n" + sealed, True),
            (b'{"text": "theirs"}\n', False),
            (b"theirs", False),
        ):
            path.write_bytes(content)
            if ours:
                folder.check()
                assert folder.clear() == [] and path.read_bytes() == content
            else:
                with pytest.raises(FolderError, match=r"log\.jsonl: is not what"):
                    folder.clear(growing=True)


# -- one writer


HOLD = """
import sys, time
from pathlib import Path
from indexcache_search.workdir.lock import locked

with locked(Path(sys.argv[1]), "indexcache-search"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    """The second is told who the first is; a killed one does not count."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    words = rf"indexcache-search is using this folder: process {process.pid} on .+, since 20..-..-.. ..:..:.. UTC"
    for _ in range(2):
        with pytest.raises(FolderError, match=words), own(tmp_path).held():
            pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with own(tmp_path).held(), pytest.raises(FolderError, match=f"process {os.getpid()} "), locked(tmp_path, COMMAND):
        pass
    assert names_in(tmp_path) == []


def test_a_lock_that_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("theirs")
    with pytest.raises(FolderError, match="is no lock of ours"), locked(tmp_path, COMMAND):
        pass
    assert (tmp_path / LOCK).read_text() == "theirs"
    (tmp_path / LOCK).unlink()
    (tmp_path / "other").write_text("")
    (tmp_path / LOCK).symlink_to(tmp_path / "other")
    with pytest.raises(OSError), locked(tmp_path, COMMAND):
        pass
    assert (tmp_path / LOCK).is_symlink() and (tmp_path / "other").read_text() == ""


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("indexcache_search.workdir.lock.fcntl.flock", refused)
    with pytest.raises(FolderError, match="No locks available; expected a file system that has locks"):
        own(tmp_path).held().__enter__()


def test_writers_at_once_are_never_read_torn(tmp_path: Path) -> None:
    path, ended = tmp_path / "status.json", threading.Event()

    def write(letter: str) -> None:
        for number in range(40):
            write_atomically(path, letter * (1000 + 500 * number))

    write("a")
    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    seen: list[str] = []

    def read() -> None:
        while not ended.is_set():
            seen.append(path.read_text())

    reader = threading.Thread(target=read)
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    reader.join()
    assert seen and all(len(set(text)) == 1 and len(text) % 500 == 0 for text in seen)
    assert names_in(tmp_path) == ["status.json"]


def test_what_a_killed_writer_left_goes_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [".a.json.partial", ".a.json.old.partial", f".b.json.{'0' * 32}.partial", f".a.json.{'0' * 32}.partial~"]
    for name in theirs:
        (tmp_path / name).write_text("theirs")
    (tmp_path / f".a.json.{'1' * 32}.partial").symlink_to(tmp_path / theirs[0])
    left = tmp_path / f".a.json.{'2' * 32}.partial"
    left.write_text("half")
    with left.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_atomically(tmp_path / "a.json", "whole")
        assert left.exists()  # its writer lives
    write_atomically(tmp_path / "a.json", "whole")
    assert not left.exists() and len(names_in(tmp_path)) == len(theirs) + 2
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as raised:
        patch.setattr("sglang_indexcache.io.atomic.os.fsync", full)
        write_atomically(tmp_path / "a.json", "more")
    assert raised.value.filename == str(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == "whole" and len(names_in(tmp_path)) == len(theirs) + 2


# -- what is read and what is written


@pytest.mark.parametrize(
    ("read", "write"),
    [
        ("model", "model"),
        ("model", "model/out"),
        ("model", "model/a/b/../../out"),
        ("model", "."),
        ("./model/../model", "out/../model/x"),
        ("link", "model/out"),
        ("model", "link/out"),
        ("model", "out/.."),
        ("file.jsonl", "file.jsonl"),
        ("out/metrics.json", "out"),
        ("filelink", "out"),
        ("out/work/tokens.jsonl", "out"),
    ],
)
def test_what_overlaps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, write: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "out/work"):
        Path(name).mkdir(parents=True)
    for name in ("model/config.json", "file.jsonl", "out/metrics.json", "out/work/tokens.jsonl"):
        Path(name).write_text("{}")
    Path("link").symlink_to("model")
    Path("filelink").symlink_to("out/metrics.json")
    before, output = snapshot(tmp_path), Path(write)
    names = (
        [output, output / "metrics.json", output / "work"]
        if read == write
        else [output / "metrics.json", output / "work"]
    )
    with pytest.raises(FolderError, match="what is read and what is written overlap; choose another --output"):
        check_apart({"--output": output}, names, {"--model": [read]})
    assert snapshot(tmp_path) == before


def test_what_lies_apart_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("sft.jsonl").write_text("{}")
    for read in ("model", "sft.jsonl", "owner/name", "demo:text", "x" * 5000, "a\0b"):
        for write in ("out", "model-out", "mode"):
            check_apart({"--output": Path(write)}, [Path(write) / "metrics.json"], {"--model": [read]})
    check_apart({"--output": Path()}, [Path("metrics.json"), Path("work")], {"--training": ["sft.jsonl"]})


def test_a_work_folder_of_somebody_else_is_not_ours(tmp_path: Path) -> None:
    """Neither one with a link's name, nor one with other things in it; an empty one may be what a kill left."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "work").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match="is no folder, and links are not followed"):
        outputs("indexcache-eval", tmp_path / "out", tmp_path / "out" / "work", (), {}).__enter__()
    assert names_in(tmp_path / "elsewhere") == []
    (tmp_path / "out" / "work").unlink()
    (tmp_path / "out" / "work").mkdir()
    with outputs("indexcache-eval", tmp_path / "out", tmp_path / "out" / "work", (), {}) as found:
        found.journal()
    (tmp_path / "out" / "work" / MARK).rename(tmp_path / "out" / "work" / "thesis.tex")
    with pytest.raises(FolderError, match=r"work: is there already, and no indexcache-run\.json says"):
        outputs("indexcache-eval", tmp_path / "out", tmp_path / "out" / "work", (), {}).__enter__()


# -- names


def test_each_name_stands_for_one_pattern() -> None:
    def named(*asked: tuple[str | None, str]) -> list[str]:
        return unique_names([(name, PatternSpec.read(text), "") for name, text in asked])

    assert named((None, "FSS"), ("mine", "FFS")) == ["letters", "mine"]
    assert named((None, "FSS"), (None, "FFS"), ("letters", "FFF")) == ["FSS", "FFS", "letters"]
    assert named((None, "uniform@1/2"), (None, "uniform@1/4")) == ["uniform@1/2", "uniform@1/4"]
    for twice in (
        [(None, "FSS"), (None, "FSS")],
        [("a", "FSS"), ("a", "FFS")],
        [("FFS", "FSS"), (None, "FFS"), (None, "FFF")],
    ):
        with pytest.raises(SearchError, match="stands there twice"):
            named(*twice)
    for name in ("baseline", "uniform phase 1", "uniform, mean of 4 phases", "uniform (paper's phase)"):
        with pytest.raises(SearchError, match="is taken, expected another before the ="):
            named((name, "FSS"))
