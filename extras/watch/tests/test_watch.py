"""indexcache-watch on servers: what is asked, the record, metrics, refusals."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from extras.watch.tests.watching import Stub, finished, log_of_forty, losing_requests, pair_of_servers, watch
from indexcache_search.engines.own_server import free_port
from indexcache_watch import run as run_module
from indexcache_watch.cli import app


@pytest.fixture
def pair() -> Iterator[tuple[Stub, Stub]]:
    with pair_of_servers() as servers:
        yield servers


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return log_of_forty(tmp_path)


def test_a_pattern_that_loses_nothing_passes(pair: tuple[Stub, Stub], log: Path) -> None:
    result = watch(pair, log.parent)
    assert result.exit_code == 0, result.output
    assert "1-2048" in result.stdout and "40" in result.stdout and "+0.000 ±0.000" in result.stdout
    for stub in pair:
        assert len(stub.asked) == 40 and stub.asked[0]["input_ids"] == [0, 1, 2, 3, 4]
        assert {body["logprob_start_len"] for body in stub.asked} == {2}  # the prompt's own losses are not computed
        assert not any(body["log_metrics"] for body in stub.asked)


def test_of_a_server_that_selects_in_blocks_replies_are_read_in_pieces_that_do_not(
    pair: tuple[Stub, Stub], tmp_path: Path
) -> None:
    """Its prompts' tokens see later ones, and their loss is another than that of written ones."""
    log = tmp_path / "log" / "host_0.log"
    log.parent.mkdir()
    log.write_text(finished([7] * 100, [8] * 300) + finished([9, 9], [9] * 4))
    pair[0].pattern = "FSFS+0q4+2q16"
    assert watch(pair, log).exit_code == 0
    asked = [(len(body["input_ids"]), body["logprob_start_len"]) for body in pair[0].asked]
    assert asked == [(227, 99), (354, 226), (400, 353), (6, 1)]
    assert [len(body["input_ids"]) for body in pair[1].asked] == [400, 6], "the reference selects for each query"
    rows = [json.loads(line) for line in (tmp_path / "out" / "watch.jsonl").read_text().splitlines()[1:]]
    assert [(row["tokens"], row["served"], row["reference"]) for row in rows] == [(300, 300.0, 300.0), (4, 4.0, 4.0)]
    pair[0].pattern = "FSFS+0z4"
    result = watch(pair, log, "--restart")
    assert result.exit_code == 2 and pair[0].url in result.stderr and "expected a layer with q" in result.stderr


def test_a_pattern_that_loses_too_much_ends_with_one_line(pair: tuple[Stub, Stub], log: Path) -> None:
    with log.open("a") as file:
        file.write(losing_requests(200))
    result = watch(pair, log)
    assert result.exit_code == 1, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith(f"indexcache-watch: {pair[0].url}: requests of 1-2048 tokens: loss changes by +0.")
    assert len(pair[0].asked) < 200


def test_the_same_command_goes_on_and_a_breach_stays(pair: tuple[Stub, Stub], log: Path, tmp_path: Path) -> None:
    log.write_text(losing_requests(10))
    assert watch(pair, log).exit_code == 0
    log.write_text(losing_requests(200))
    assert watch(pair, log).exit_code == 1
    asked, content = len(pair[0].asked), (tmp_path / "out" / "watch.jsonl").read_bytes()
    assert watch(pair, log).exit_code == 1 and len(pair[0].asked) == asked  # nothing is asked again
    assert (tmp_path / "out" / "watch.jsonl").read_bytes() == content
    whole = CliRunner().invoke(
        app,
        [
            *("--served", pair[0].url, "--reference", pair[1].url, "--requests", str(log), "--rate", "1000"),
            *("--output", str(tmp_path / "whole")),
        ],
    )
    assert whole.exit_code == 1 and (tmp_path / "whole" / "watch.jsonl").read_bytes() == content
    pair[0].fingerprint = "b" * 64
    result = watch(pair, log)
    assert result.exit_code == 2 and "belongs to a watch with fingerprint aaaa" in result.stderr
    assert watch(pair, log, "--restart", "--num-requests", "3").exit_code == 0


def test_requests_are_sampled_by_content_and_each_is_asked_once(pair: tuple[Stub, Stub], log: Path) -> None:
    log.write_text(2 * "".join(finished([number], [1]) for number in range(200)))
    assert watch(pair, log, "--sample", "0.25").exit_code == 0
    first = [body["input_ids"] for body in pair[0].asked]
    assert 25 < len(first) < 75 and len({tuple(tokens) for tokens in first}) == len(first)
    again = watch(pair, log, "--sample", "0.25", "--restart")
    assert again.exit_code == 0, again.output
    assert [body["input_ids"] for body in pair[0].asked] == 2 * first


def test_the_rate_is_kept(pair: tuple[Stub, Stub], log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

        @staticmethod
        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            slept.append(seconds)

    monkeypatch.setattr(run_module, "time", Clock)
    assert watch(pair, log, "--rate", "0.5", "--num-requests", "4").exit_code == 0
    assert slept == [0.0, 2.0, 2.0, 2.0]


def test_metrics_say_what_is_lost_and_stay_after_a_breach(
    pair: tuple[Stub, Stub], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, seen = free_port(), list[str]()

    def sleep(seconds: float) -> None:
        if seconds == 77:  # --hold
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                seen.extend(answer.read().decode().splitlines())

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    log.write_text(finished([1], []) + losing_requests(100))
    assert watch(pair, log, "--port", str(port), "--hold", "77").exit_code == 1
    values = dict(line.rsplit(" ", 1) for line in seen if not line.startswith("#"))
    bucket = '{bucket="1-2048"}'
    assert values[f"indexcache_watch_breached{bucket}"] == "1.0"
    assert float(values[f"indexcache_watch_loss_change{bucket}"]) == pytest.approx(0.3)
    assert float(values[f"indexcache_watch_evidence{bucket}"]) >= 1
    assert float(values[f"indexcache_watch_requests{bucket}"]) == len(pair[0].asked)
    assert values["indexcache_watch_allowed_loss_change"] == "0.1"
    assert float(values["indexcache_watch_last_request_timestamp_seconds"]) > 1e9
    assert values['indexcache_watch_breached{bucket="131073-"}'] == "0.0"
    [info] = [name for name in values if name.startswith("indexcache_watch_info")]
    assert f'fingerprint="{"a" * 64}"' in info and pair[0].url in info and values[info] == "1.0"


def test_a_log_is_followed(pair: tuple[Stub, Stub], log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        if seconds == run_module.POLL_SECONDS:  # nothing new: the server goes on
            with log.open("a") as file:
                file.write(losing_requests(200))

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    result = watch(pair, log, "--follow")
    assert result.exit_code == 1 and len(pair[0].asked) > 40, result.output


def test_sigterm_ends_a_watch_that_follows_and_it_goes_on(pair: tuple[Stub, Stub], log: Path, tmp_path: Path) -> None:
    words = ["--served", pair[0].url, "--reference", pair[1].url, "--requests", str(log), "--rate", "1000", "--follow"]
    code = "from indexcache_watch.__main__ import main; main()"
    command = [sys.executable, "-c", code, *words, "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while len(pair[1].asked) < 40 and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        _, stderr = process.communicate(timeout=300)
    line = "indexcache-watch: ended by SIGTERM; the same command goes on from here\n"
    assert (process.returncode, stderr) == (143, line)
    assert watch(pair, log).exit_code == 0 and len(pair[0].asked) <= 41  # the last one may not have been recorded


def test_a_request_that_a_server_refuses_is_left_out(pair: tuple[Stub, Stub], log: Path) -> None:
    with log.open("a") as file:
        file.write(finished(list(range(2000)), [1]))
    result = watch(pair, log)
    assert result.exit_code == 0, result.output
    assert 'not scored: 1 requests: a server refuses it: {"error": {"message": "too long"}}' in result.stderr


def test_a_loss_that_is_not_finite_ends_the_watch(pair: tuple[Stub, Stub], log: Path) -> None:
    pair[0].loss = lambda token: math.nan if token == 4 else 1.0
    result = watch(pair, log)
    assert result.exit_code == 1
    assert result.stderr == f"indexcache-watch: {pair[0].url}: the loss of {log}: line 1 is nan\n"


def test_a_damaged_record_is_refused_and_a_cut_off_line_is_not(
    pair: tuple[Stub, Stub], log: Path, tmp_path: Path
) -> None:
    assert watch(pair, log).exit_code == 0
    record = tmp_path / "out" / "watch.jsonl"
    whole = record.read_bytes()
    record.write_bytes(whole[:-20])
    assert watch(pair, log).exit_code == 0 and record.read_bytes() == whole
    record.write_bytes(whole.replace(b'"tokens": 2', b'"tokens": 1', 1))
    result = watch(pair, log)
    assert result.exit_code == 2 and "watch.jsonl: line 2 is damaged; --restart discards the file" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pair, log: pair[1].__setattr__("fingerprint", "a" * 64), "serves the same pattern, fingerprint aaaa"),
        (lambda pair, log: pair[0].__setattr__("proven", False), "is not proven to serve its pattern since"),
        (lambda pair, log: pair[0].__setattr__("selection", {"pages": 4}), "reads prompts without its pattern"),
        (lambda pair, log: log.write_text("Finish: obj=...\n"), "host_0.log: line 1: not JSON"),
        (
            lambda pair, log: log.write_text('{"text": "hi"}\n'),
            "line 1: has no input_ids, expected them with output_ids",
        ),
        (lambda pair, log: log.write_text(""), "no request could be scored"),
        (lambda pair, log: log.unlink(), "no such file or folder"),
        (lambda pair, log: pair[1].http.server_close() or pair[1].http.shutdown(), "can't be read"),
    ],
    ids=["same pattern", "not proven", "dense", "text log", "text rows", "empty", "missing", "no server"],
)
def test_mistakes_get_one_line(
    pair: tuple[Stub, Stub], log: Path, change: Callable[[Any, Path], object], message: str
) -> None:
    change(pair, log)
    result = watch(pair, log)
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("indexcache-watch: ") and message in line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--buckets", "10,5"], "expected up to 16 ascending lengths"),
        (["--buckets", "ten"], "expected up to 16 ascending lengths"),
        (["--hold", "5"], "--hold needs --port"),
        (["--allowed", "nan"], "'--allowed': found nan"),
        (["--alpha", "0.9"], "'--alpha'"),
        (["--rate", "0"], "'--rate'"),
        (["--sample", "1.5"], "'--sample'"),
    ],
)
def test_options_that_can_not_be_get_one_line(
    pair: tuple[Stub, Stub], log: Path, more: list[str], message: str
) -> None:
    result = watch(pair, log, *more)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_one_server_is_not_compared_with_itself(pair: tuple[Stub, Stub], log: Path) -> None:
    result = watch((pair[0], pair[0]), log)
    assert result.exit_code == 2 and "are the same server" in result.stderr


def test_a_port_that_is_taken_is_one_line(pair: tuple[Stub, Stub], log: Path) -> None:
    result = watch(pair, log, "--port", pair[0].url.rpartition(":")[2])
    assert result.exit_code == 2 and "which can't be had" in result.stderr


@pytest.mark.parametrize("first", ["prefill_0.log", "decode_0.log"])
def test_two_servers_of_one_request_log_it_once(pair: tuple[Stub, Stub], log: Path, tmp_path: Path, first: str) -> None:
    """Prefill and decode servers share an id or a room, and the prompt; one has the first token alone."""
    log.unlink()
    replies = {"prefill_0.log": [7], "decode_0.log": [7, 8, 9]}
    for age, name in enumerate(sorted(replies, key=lambda name: name != first)):
        lines = "".join(
            finished([number, 1, 2], replies[name], **more)
            for number in range(20)
            for more in ({}, {"bootstrap_room": 500 + number})
        )
        path = log.parent / name
        path.write_text(lines)
        os.utime(path, (1e9 + age, 1e9 + age))
    result = watch(pair, log.parent, "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert len(pair[0].asked) == 20
    assert "another server's log has it as well" in result.stderr


def test_every_reason_for_which_requests_are_not_scored_is_shown(pair: tuple[Stub, Stub], log: Path) -> None:
    """A LoRA adapter that a table of the commonest reasons left out would never be missed."""
    with log.open("a") as file:
        for number, name in enumerate(("own", "other")):
            file.write(finished([9, number], [1], lora_path=name))
        for number in range(3):
            file.write(finished([number], []) + finished([number], [1], image_data=["?"]))
            file.write(finished([number], [1], input_embeds=[[0.5]]) + finished([number, "..."], [1]))
    result = watch(pair, log)
    assert result.exit_code == 0 and len(pair[0].asked) == 40
    for reason in ("wrote its reply: own", "wrote its reply: other", "it has images", "its prompt is embeddings"):
        assert f"not scored: {1 if 'reply' in reason else 3} requests: " in result.stderr and reason in result.stderr
