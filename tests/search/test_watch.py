"""indexcache-watch: logs of requests, the record, metrics, refusals."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from indexcache_search.cli.watch import app
from indexcache_search.engines.own_server import free_port
from indexcache_search.errors import DataError
from indexcache_search.watch import run as run_module
from indexcache_search.watch.requests import RequestLog
from tests.search.test_fuzz import mutated, one_line_or

# -- logs


def finished(tokens: list[int], reply: list[int], **more: Any) -> str:
    """A line of SGLang's log."""
    content = {"event": "request.finished", "rid": "1", "obj": {"input_ids": tokens, "text": None, **more}}
    return f"[2026-11-28 07:13:41] {json.dumps({**content, 'out': {'output_ids': reply, 'meta_info': {}}})}\n"


def found(path: Path) -> list[tuple[list[int], list[bool]]]:
    return [(request.tokens.tolist(), request.counts.tolist()) for request in RequestLog(path).new()]


def test_logs_of_sglang_are_read_with_those_that_it_renamed(tmp_path: Path) -> None:
    received = json.dumps({"event": "request.received", "rid": "1", "obj": {"input_ids": [1]}})
    (tmp_path / "host_0.log.2026-11-28_06").write_text(finished([1, 2], [3]))
    (tmp_path / "host_0.log").write_text(f"[2026-11-28 07:13:41] {received}\n" + finished([4], [5, 6]))
    (tmp_path / ".hidden.log").write_text("no JSON")
    (tmp_path / "notes.txt").write_text("no JSON")
    assert sorted(found(tmp_path)) == [([1, 2, 3], [False, False, True]), ([4, 5, 6], [False, True, True])]


def test_what_is_no_request_of_a_client_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        finished([1], [2], log_metrics=False)  # a health check, or one of the watch itself
        + finished([1], [])
        + json.dumps(
            {"event": "request.finished", "obj": {"text": "hi", "input_ids": None}, "out": {"output_ids": [1]}}
        )
        + "\n"
        + finished([1, "...", 2], [3])
        + finished([1, 2], [3]).replace('"meta_info": {}', '"meta_info": {"prompt_tokens": 9}')
        + finished([1, 2], [3]).replace('"meta_info": {}', '"meta_info": {"prompt_tokens": 2, "completion_tokens": 7}')
    )
    log = RequestLog(tmp_path)
    assert list(log.new()) == []
    assert log.skipped == {
        "none of its tokens count": 1,
        "its log has the prompt as text, or not at all": 1,
        "its log is cut, expected --log-requests-level 3": 1,
        "its log has not all of its input_ids": 1,
        "its log has not all of its output_ids": 1,
    }


def test_rows_of_a_searchs_data_are_requests(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 0]},
        {"input_ids": [1, 2], "labels": [-100, 2]},
        {"input_ids": [7, 8], "output_ids": [9]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))  # no line break at the end
    assert found(path) == [
        ([1, 2, 3, 4], [False, False, True, False]),
        ([1, 2], [False, True]),
        ([7, 8, 9], [False, False, True]),
    ]


def test_a_log_is_read_on_from_its_end_and_a_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    line = finished([3], [4])
    path.write_text(finished([1], [2]) + line[:30])
    log = RequestLog(path)
    assert [request.place for request in log.new(last=False)] == [f"{path}: line 1"]
    assert list(log.new()) == []  # cut off, so still being written
    path.write_text(finished([1], [2]) + line)
    assert [request.place for request in log.new()] == [f"{path}: line 2"]
    path.rename(tmp_path / "a.log.2026-11-28_07")
    log.path = tmp_path / "a.log.2026-11-28_07"
    assert list(log.new()) == []


def test_a_log_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(finished([1], [2]) + finished([3], [4]))
    log = RequestLog(tmp_path)
    assert len(list(log.new())) == 2
    path.write_text(finished([5], [6]))
    assert [request.tokens.tolist() for request in log.new()] == [[5, 6]]


def test_as_many_bad_rows_are_left_out_as_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text('{"torn' + finished([1], [2]) + finished([3], [4]) + "{}\n")
    log = RequestLog(path, skip_bad=2)
    assert [request.place for request in log.new()] == [f"{path}: line 2"]
    assert log.skipped == {"it can't be understood": 2}
    with pytest.raises(DataError, match=r"line 3: has no input_ids, .*; --skip-bad N leaves out up to N such rows"):
        list(RequestLog(path, skip_bad=1).new())


def test_a_thousand_mutated_logs(tmp_path: Path) -> None:
    rng, accepted, path = random.Random(11), 0, tmp_path / "a.log"
    for _ in range(1_000):
        lines = [finished([rng.randrange(99) for _ in range(8)], [rng.randrange(99)]) for _ in range(2)]
        lines += [json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}) + "\n"]
        path.write_bytes(mutated("".join(lines), rng).encode("utf-8", "surrogatepass"))
        requests = one_line_or(lambda: list(RequestLog(path).new()))
        accepted += requests is not None
        for request in requests or ():
            assert request.counts.any() and len(request.counts) == len(request.tokens) and request.tokens.min() >= 0
    assert 0.01 < accepted / 1_000 < 0.95


# -- servers


class Stub:
    """A server on which token t has the loss `loss(t)`; a prompt above `longest` is refused."""

    def __init__(self, loss: Callable[[int], float], fingerprint: str | None, longest: int = 1000) -> None:
        stub = self
        self.asked: list[dict[str, Any]] = []
        self.fingerprint, self.proven, self.loss = fingerprint, True, loss
        self.selection: dict[str, int] | None = None

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                state = {"fingerprint": stub.fingerprint, "proven": stub.proven, "selection": stub.selection}
                self.reply(200, {"internal_states": [{"indexcache": state if stub.fingerprint else None}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                stub.asked.append(body)
                if len(body["input_ids"]) > longest:
                    self.reply(400, {"error": {"message": "too long"}})
                    return
                tokens = body["input_ids"][body["logprob_start_len"] :]
                logprobs = [[None, tokens[0], None], *([stub.logprob(token), token, None] for token in tokens[1:])]
                tops = [None, *([[0.0, 0, None]] for _ in tokens[1:])]
                self.reply(200, {"meta_info": {"input_token_logprobs": logprobs, "input_top_logprobs": tops}})

            def reply(self, code: int, content: Any) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def logprob(self, token: int) -> float | None:
        """As JSON has it: null for what is not a number."""
        loss = self.loss(token)
        return -loss if math.isfinite(loss) else None


@pytest.fixture
def pair() -> Iterator[tuple[Stub, Stub]]:
    """A served pattern that loses 0.3 on each token from 50 on, and its reference."""
    served, reference = Stub(lambda token: 1.3 if token >= 50 else 1.0, "a" * 64), Stub(lambda token: 1.0, None)
    yield served, reference
    for stub in (served, reference):
        stub.http.shutdown()
        stub.http.server_close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Forty requests that lose nothing."""
    path = tmp_path / "log" / "host_0.log"
    path.parent.mkdir()
    path.write_text("".join(finished([number, 1, 2], [3, 4]) for number in range(40)))
    return path


def losing_requests(count: int) -> str:
    return "".join(finished([number, 1, 2], [50, 60, 70]) for number in range(count))


def watch(pair: tuple[Stub, Stub], log: Path, *more: str) -> Any:
    urls = ["--served", pair[0].url, "--reference", f"{pair[1].url}/v1"]
    output = ["--output", str(log.parent.parent / "out")]
    return CliRunner().invoke(app, [*urls, "--requests", str(log), *output, "--rate", "1000", *more])


def test_a_pattern_that_loses_nothing_passes(pair: tuple[Stub, Stub], log: Path) -> None:
    result = watch(pair, log.parent)
    assert result.exit_code == 0, result.output
    assert "1-2048" in result.stdout and "40" in result.stdout and "+0.000 ±0.000" in result.stdout
    for stub in pair:
        assert len(stub.asked) == 40 and stub.asked[0]["input_ids"] == [0, 1, 2, 3, 4]
        assert {body["logprob_start_len"] for body in stub.asked} == {2}  # the prompt's own losses are not computed
        assert not any(body["log_metrics"] for body in stub.asked)


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
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                seen.extend(answer.read().decode().splitlines())

    monkeypatch.setattr(run_module.time, "sleep", sleep)
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

    monkeypatch.setattr(run_module.time, "sleep", sleep)
    result = watch(pair, log, "--follow")
    assert result.exit_code == 1 and len(pair[0].asked) > 40, result.output


def test_sigterm_ends_a_watch_that_follows_and_it_goes_on(pair: tuple[Stub, Stub], log: Path, tmp_path: Path) -> None:
    words = ["--served", pair[0].url, "--reference", pair[1].url, "--requests", str(log), "--rate", "1000", "--follow"]
    code = "from indexcache_search.__main__ import watch; watch()"
    command = [sys.executable, "-c", code, *words, "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while len(pair[1].asked) < 40 and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        _, stderr = process.communicate(timeout=60)
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


def test_a_pattern_that_is_exchanged_meanwhile_ends_the_watch(
    pair: tuple[Stub, Stub], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "RECHECK", 10)

    def exchange(token: int) -> float:
        pair[0].fingerprint = "b" * 64
        return 1.0

    pair[0].loss = exchange
    result = watch(pair, log)
    assert result.exit_code == 2 and "serves another pattern than when this watch began" in result.stderr
    assert len(pair[0].asked) == 10


def test_a_breach_is_not_blamed_on_a_pattern_that_is_served_no_more(pair: tuple[Stub, Stub], log: Path) -> None:
    def exchange(token: int) -> float:
        pair[0].fingerprint = "b" * 64
        return 9.0

    pair[0].loss = exchange
    result = watch(pair, log)
    assert result.exit_code == 2 and "serves another pattern than when this watch began" in result.stderr


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
