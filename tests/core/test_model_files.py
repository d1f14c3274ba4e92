"""Digests of a model's files: all bytes, remembered only while nobody could have written, never for somebody else."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from sglang_indexcache.checkpoint.checkpoint import weights_digest
from sglang_indexcache.io import digest as module
from sglang_indexcache.io.digest import file_digest, side_by_side
from sglang_indexcache.io.errors import FileError, ModelConfigError
from sglang_indexcache.io.messages import MODEL_CHANGED
from sglang_indexcache.model.files import ModelFiles, weight_files

HOUR = 3600


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of one's own, for files of any size and age."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_REMEMBERED_FROM", 0)
    monkeypatch.setattr(module, "_SETTLED_NS", -HOUR * 10**9)
    return tmp_path / "cache" / "sglang_indexcache" / "digests"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files with the names of a checkpoint in two parts."""
    folder = tmp_path / "model"
    folder.mkdir()
    parts = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    for name in ("one.safetensors", "two.safetensors", "config.json", "tokenizer.json"):
        (folder / name).write_text(name)
    return folder


def rewrite(path: Path, content: str) -> None:
    """Write other content of the same length, and set the time of the last write back."""
    before = path.stat()
    path.write_text(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def test_every_byte_of_a_large_file_counts(tmp_path: Path) -> None:
    """64 KiB in the middle of 300 MiB: once, only the ends of large files were read."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(300 << 20)
    before = file_digest(path).sha256
    with path.open("r+b") as file:
        file.seek(150 << 20)
        file.write(b"\1" * (64 << 10))
    assert file_digest(path).sha256 != before


def test_what_belongs_to_the_weights(folder: Path) -> None:
    weights = ModelFiles.read(folder, weight_files)
    assert weights.sha256 == weights_digest(str(folder))
    (folder / "consolidated.safetensors").write_text("of no index, so no engine loads it")
    (folder / "optimizer.pt").write_text("neither")
    (folder / "README.md").write_text("nor this")
    weights.check()
    assert weights_digest(str(folder)) == weights.sha256
    for name in ("two.safetensors", "config.json"):
        rewrite(folder / name, name.upper())
        assert weights_digest(str(folder)) != weights.sha256
        with pytest.raises(ModelConfigError, match=f"{name}: {MODEL_CHANGED}; expected the same"):
            weights.check()
        rewrite(folder / name, name)
        weights.check()  # the old ones are back
    (folder / "one.safetensors").rename(folder / "three.safetensors")
    with pytest.raises(ModelConfigError, match=r"index\.json: names 'one\.safetensors', and there is no such file"):
        weights.check()


@pytest.mark.parametrize("place", ["../one.safetensors", "/etc/passwd", 3, "nothing.safetensors"])
def test_an_index_names_files_beside_it(folder: Path, place: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(ModelConfigError, match="there is no such file beside it"):
        weights_digest(str(folder))


def test_a_digest_is_remembered_while_the_file_stays(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "weights"
    path.write_text("first")
    first = file_digest(path)
    [entry] = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700 and stat.S_IMODE(entry.stat().st_mode) == 0o600
    sealed = entry.read_bytes()
    line = sealed.split(b"\n")[0].replace(first.sha256.encode(), b"0" * 64)
    entry.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode())
    assert file_digest(path).sha256 == "0" * 64  # it was not read again
    for damaged in (b"", line, sealed[:-1], b"\xff" + sealed, b"[]\n", sealed.replace(b"a", b"b")):
        entry.write_bytes(damaged)
        assert file_digest(path) == first
        assert entry.read_bytes() == sealed
    rewrite(path, "other")
    assert file_digest(path).sha256 not in (first.sha256, "0" * 64)  # though size and time of writing are the same
    path.write_text("first")
    assert file_digest(path).sha256 == first.sha256


def test_a_young_or_small_file_is_not_remembered(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems tell times apart by two seconds: a second write may leave the same one."""
    path = tmp_path / "weights"
    path.write_text("first")
    monkeypatch.setattr(module, "_SETTLED_NS", 2_000_000_000)
    file_digest(path)
    monkeypatch.setattr(module, "_SETTLED_NS", -HOUR * 10**9)
    monkeypatch.setattr(module, "_REMEMBERED_FROM", 6)
    file_digest(path)
    assert not cache.exists()


@pytest.mark.parametrize("what", ["open to others", "a link", "somebody's", "a file", "not writable", "no home"])
def test_a_cache_that_others_could_write_to_is_not_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "weights"
    path.write_text("first")
    cache.parent.mkdir(parents=True)
    if what == "open to others":
        cache.mkdir()
        cache.chmod(0o770)
    elif what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        cache.symlink_to(tmp_path / "elsewhere")
    elif what == "somebody's":
        cache.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    elif what == "a file":
        cache.write_text("")
    elif what == "not writable":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert len(file_digest(path).sha256) == 64
    assert not cache.is_dir() or not list(cache.iterdir())


def test_who_wants_the_same_digest_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a server start at once; one of them reads a terabyte, not each."""
    path, read = tmp_path / "weights", list[Path]()
    path.write_text("first")
    check = module.check_same

    def slowly(file: Any, path: Path, stamp: Any) -> None:
        read.append(path)
        time.sleep(0.3)
        check(file, path, stamp)

    monkeypatch.setattr(module, "check_same", slowly)
    threads = [Thread(target=file_digest, args=(path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 1


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_text("first")
    monkeypatch.setattr(module, "_check_wanted", lambda _: rewrite(path, "other"))
    with pytest.raises(FileError, match="weights: changed while it was read; expected a file that nobody writes to"):
        file_digest(path)


def test_an_error_ends_the_other_files(tmp_path: Path) -> None:
    stopped: list[bool] = []

    def work(path: Path, stop: Event) -> None:
        if path.name == "bad":
            raise FileError("bad")
        stopped.append(stop.wait(120))

    with pytest.raises(FileError, match="bad"):
        side_by_side(work, [Path("bad"), Path("good")])
    assert all(stopped)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="pipe: not a regular file"):
        file_digest(tmp_path / "pipe")
