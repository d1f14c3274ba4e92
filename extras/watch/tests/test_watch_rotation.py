"""indexcache-watch: logs that servers and logrotate rename, copy, cut and compress while they are read."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from extras.watch.tests.watching import finished
from indexcache_search.errors import DataError
from indexcache_watch import files
from indexcache_watch.requests import RequestLog

SEEDS = 60


def compressed(path: Path) -> Path:
    """Compress a file as logrotate does: the new one stands before the old one goes."""
    found = path.with_name(path.name + ".gz")
    found.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return found


def numbers(log: RequestLog, last: bool = True) -> list[int]:
    return [int(request.tokens[0]) for request in log.new(last)]


class Server:
    """Writes requests to its log, each with a number of its own, and leaves a part of a line when it is killed."""

    def __init__(self, path: Path, rng: random.Random, first: int) -> None:
        self.path, self.rng, self.next, self.rotations = path, rng, first, 0
        self.written: set[int] = set()
        self.torn, self.lost = False, set[int]()

    def write(self) -> None:
        with self.path.open("a") as file:
            for _ in range(self.rng.randrange(4)):
                line = finished([self.next, *range(self.rng.randrange(200))], [1, 2])
                file.write(line)
                (self.lost if self.torn else self.written).add(self.next)  # behind a part of a line
                self.torn = False
                self.next += 1

    def kill(self) -> None:
        if not self.torn:
            with self.path.open("a") as file:
                file.write(finished([999_999] * 9, [1])[: self.rng.randrange(1, 90)])
            self.torn = True

    def turn(self) -> None:
        """Rotate, in one of the ways that there are, or write on."""
        self.rotations += 1
        old = self.path.with_name(f"{self.path.name}.{self.rotations}")
        action = self.rng.choice(["write", "write", "write", "rename", "copy and cut", "compress", "kill", "touch"])
        if not self.path.exists() or action == "write":
            self.write()
        elif action == "rename":
            self.path.rename(old)
            self.torn = False
        elif action == "copy and cut":
            shutil.copy(self.path, old)
            os.truncate(self.path, 0)
            self.torn = False
            self.write()  # as much as before, or more
        elif action == "compress":
            plain = sorted(path for path in self.path.parent.glob(f"{self.path.name}.*") if path.suffix != ".gz")
            if plain:
                compressed(self.rng.choice(plain))
        elif action == "kill":
            self.kill()
        else:
            os.utime(self.path)


@pytest.mark.parametrize("batch", [1 << 22, 300], ids=["whole", "in parts"])
def test_no_request_is_lost_or_counted_twice_whatever_becomes_of_its_file(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by name or inode alone, a log that is copied or compressed counts twice, and one that is cut is lost."""
    monkeypatch.setattr(files, "_BATCH", batch)
    for seed in range(SEEDS):
        folder, rng = tmp_path / f"{batch}-{seed}", random.Random(seed)
        folder.mkdir()
        servers = [Server(folder / name, rng, first) for name, first in (("a_0.log", 0), ("b_0.log", 100_000))]
        servers[0].write()
        servers[1].write()
        log, seen = RequestLog(folder, skip_bad=10_000), list[int]()
        for _ in range(rng.randrange(5, 40)):
            rng.choice(servers).turn()
            if rng.random() < 0.4 and any(folder.iterdir()):
                for request in log.new(last=False):
                    seen.append(int(request.tokens[0]))
                    if rng.random() < 0.05:
                        rng.choice(servers).turn()  # while the watch scores
        seen += numbers(log)
        assert len(seen) == len(set(seen)), (seed, "twice")
        assert set(seen) == servers[0].written | servers[1].written, (seed, "lost")
        torn = sum(len(server.lost) for server in servers)
        assert log.skipped["it can't be understood"] == torn, (seed, log.skipped)
        again = RequestLog(folder, skip_bad=10_000)  # all at once, as a cron job does
        assert sorted(numbers(again)) == sorted(seen), seed


def test_a_log_that_is_compressed_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "host_0.log"
    path.write_text(finished([1], [2]) + finished([3], [4]))
    log = RequestLog(tmp_path)
    first = next(log.new(last=False))
    assert first.tokens.tolist() == [1, 2]
    path.rename(tmp_path / "host_0.log.2026-11-28_06")
    found = compressed(tmp_path / "host_0.log.2026-11-28_06")
    path.write_text(finished([5], [6]))
    requests = list(log.new())
    assert sorted((request.tokens.tolist(), request.place) for request in requests) == [
        ([3, 4], f"{found}: line 2"),
        ([5, 6], f"{path}: line 1"),
    ]


def test_a_log_that_was_cut_and_is_longer_again_is_read_anew(tmp_path: Path) -> None:
    """By its size alone it looks as if it had grown, and reading would go on in the middle of a line."""
    path = tmp_path / "host_0.log"
    path.write_text(finished([1], [2]))
    log = RequestLog(tmp_path)
    assert numbers(log) == [1]
    os.truncate(path, 0)
    path.write_text(finished([7], [2]) + finished([8], [2]) + finished([9], [2]))
    assert numbers(log) == [7, 8, 9]


@pytest.mark.parametrize(
    "name",
    ["a.log", "a.log.1", "a.log.12", "a.log.2026-11-28_06", "a.log-20261128", "a.log-20261128-1764374400", "a.JSONL"],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_names_that_rotation_gives_are_read(tmp_path: Path, name: str, ending: str) -> None:
    path = tmp_path / name
    path.write_text(finished([1], [2]))
    if ending:
        path = compressed(path)
    assert numbers(RequestLog(tmp_path)) == numbers(RequestLog(path)) == [1]


def test_a_file_that_is_still_being_compressed_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.log.1", tmp_path / "a.log.1.gz"
    text = "".join(finished([number], [2]) for number in range(200))
    path.write_text(text)
    content = gzip.compress(text.encode())
    packed.write_bytes(content[: len(content) // 2])
    log = RequestLog(tmp_path)
    assert numbers(log) == list(range(200))
    packed.write_bytes(content)
    path.unlink()
    assert numbers(log) == []


@pytest.mark.parametrize("cut", [5, 40, -3], ids=["its head", "its content", "its end"])
def test_a_compressed_file_that_is_damaged_gets_one_line(tmp_path: Path, cut: int) -> None:
    content = gzip.compress("".join(finished([number], [2]) for number in range(50)).encode())
    (tmp_path / "a.log.1.gz").write_bytes(content[:cut])
    with pytest.raises(DataError, match=r"a\.log\.1\.gz: line \d+: its compressed file is cut off or damaged"):
        list(RequestLog(tmp_path).new())
    log = RequestLog(tmp_path, skip_bad=1)
    assert len(numbers(log)) <= 50 and numbers(log) == [] and log.skipped == {"it can't be understood": 1}


def test_files_that_look_like_logs_and_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(finished([1], [2]))
    for name in ("a.log.1.xz", "a.log.bak", "notes.txt", ".a.log.swp"):
        (tmp_path / name).write_text("?")
    log = RequestLog(tmp_path)
    assert numbers(log) == [1]
    assert [path.name for path in log.left_out] == ["a.log.1.xz", "a.log.bak"]


# -- what a log says of its requests


def logged(reply: list[int], finish: dict[str, Any] | None = None, rid: str = "1", **sent: Any) -> str:
    line = json.loads(finished([5, 6, 7], reply, **sent).split("] ", 1)[1])
    line["rid"], line["out"]["meta_info"]["finish_reason"] = rid, finish or {"type": "stop", "matched": 2}
    return json.dumps(line) + "\n"


def test_a_prefill_servers_half_of_a_request_is_no_request(tmp_path: Path) -> None:
    """SGLang ends each request of a prefill server with a length of 0; each server gives it an id of its own."""
    (tmp_path / "prefill_0.log").write_text(
        logged([8], {"type": "length", "length": 0}, "x", bootstrap_room=77, bootstrap_host="10.0.0.9")
    )
    (tmp_path / "decode_0.log").write_text(logged([8, 9, 10], rid="y", bootstrap_room=77, bootstrap_host="10.0.0.9"))
    log = RequestLog(tmp_path)
    assert [request.tokens.tolist() for request in log.new()] == [[5, 6, 7, 8, 9, 10]]
    assert log.skipped == {"a prefill server logged it, which writes one token: expected the decode server's log": 1}


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({"lora_path": "adapters/own"}, "a LoRA adapter wrote its reply: adapters/own"),
        ({"image_data": ["data:image/png;base64,AAAA"]}, "it has images, video or audio"),
        ({"input_embeds": [[0.1]]}, "its prompt is embeddings, not tokens"),
        ({"input_ids": [[1], [2]]}, "it is several requests at once"),
    ],
    ids=["adapter", "image", "embeddings", "batch"],
)
def test_what_tokens_alone_do_not_say_is_left_out_by_name(tmp_path: Path, sent: dict[str, Any], reason: str) -> None:
    """Without the adapter or the image, both servers would score a text that nobody wrote."""
    (tmp_path / "a.log").write_text(logged([8, 9], **sent) + logged([8, 9, 10]))
    log = RequestLog(tmp_path)
    assert len(list(log.new())) == 1 and log.skipped == {reason: 1}


@pytest.mark.parametrize("more", [{}, {"sampling_params": {"temperature": 1.0}}], ids=["level 0", "level 1"])
def test_a_log_without_tokens_names_its_level(tmp_path: Path, more: dict[str, Any]) -> None:
    row = {"event": "request.finished", "rid": "1", "obj": {"rid": "1", **more}, "out": {"meta_info": {}}}
    (tmp_path / "a.log").write_text(json.dumps(row) + "\n")
    log = RequestLog(tmp_path)
    assert list(log.new()) == [] and log.skipped == {"its log has no tokens, expected --log-requests-level 3": 1}


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-29T04:00:00.123456789Z stdout F " + finished([1], [2]),
        json.dumps({"log": finished([1], [2]), "stream": "stdout", "time": "2026-11-29T04:00:00Z"}) + "\n",
    ],
    ids=["containerd", "docker"],
)
def test_the_output_of_a_container_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "0.log").write_text(line)
    with pytest.raises(DataError, match=r"line 1: is a container's output, .* --log-requests-target FOLDER"):
        list(RequestLog(tmp_path).new())
