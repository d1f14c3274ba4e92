"""Seeded, bounded fuzzing of everything that comes from outside: one line or a right answer, in seconds.

Journals are in test_journal.py: every flipped bit of one is damage.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML
from safetensors import SafetensorError
from typer.testing import CliRunner

from indexcache_search.cli.search import app as search_app
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.calibration_client import CalibrationServer, ServerBusyError, ServerLostError
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.eval.endpoints import Endpoint
from indexcache_search.evaluation.records import Sealer, append
from indexcache_search.hf.loading import read_config
from sglang_indexcache import IndexCacheError, PatternFile
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.families import describe
from sglang_indexcache.http import client, connection, servers
from sglang_indexcache.io import atomic
from sglang_indexcache.io.naming import naming
from sglang_indexcache.process import exit_line
from tests.conftest import VOCAB, tiny_config
from tests.core.test_pattern_file import GOOD

SECONDS = 10.0  # of processor time: that others use the machine is no fault
ODD = [*"&*!|>%@`?:-#'\"{}[],= FS~<", "&a", "*a", "!!str ", "0", "010", "0x1F", "0o7", "1e3", ".inf", "-.5", "1:30"]
ODD += ["1_0", "yes", "null", "true", "<<", "2026-11-22", "schema: x", "é", "\n", "\n  ", "\t", "\r", "\x85", "\u2028"]
ODD += ["\ufeff", "\u202e", "\x00", "\x1b[0m"]


def mutated(text: str, rng: random.Random) -> str:
    """`text` with a few edits of the kinds that people and broken tools make."""
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text) + 1)
        lines = text.split("\n")
        match rng.randrange(6):
            case 0:
                text = text[:place] + rng.choice(ODD) + text[place:]
            case 1:
                text = text[:place] + text[place + rng.randint(1, 8) :]
            case 2:
                text = text[:place] + rng.choice(ODD) + text[place + 1 :]
            case 3:
                line = rng.randrange(len(lines))
                text = "\n".join([*lines[:line], lines[rng.randrange(len(lines))], *lines[line:]])
            case 4:
                rng.shuffle(lines) if rng.random() < 0.1 else lines.pop(rng.randrange(len(lines)))
                text = "\n".join(lines)
            case _:
                line = rng.randrange(len(lines))
                lines[line] = " " * rng.randint(1, 3) + lines[line]
                text = "\n".join(lines)
    return text


def one_line_or(function: Callable[[], Any], kinds: tuple[type[Exception], ...] = (IndexCacheError,)) -> Any:
    """What `function` gives, or None where it refuses in one printable line; anything else fails, and so does work."""
    began = time.process_time()
    try:
        return function()
    except kinds as error:
        line = str(error)
        assert line and line.isprintable(), repr(line)
        return None
    finally:
        assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_pattern_files(count: int) -> None:
    """What is accepted reads the same with a parser of YAML 1.2 that is not ours, and survives a round trip."""
    yaml = YAML(typ="safe", pure=True)
    rng, accepted = random.Random(7), 0
    for _ in range(count):
        text = mutated(GOOD, rng)
        found = one_line_or(lambda text=text: PatternFile.loads(text.encode("utf-8", "surrogatepass")))
        if found is not None:
            accepted += 1
            assert PatternFile.loads(found.dumps()) == found
            assert PatternFile.model_validate(yaml.load(text)) == found, text
    assert 0.01 < accepted / count < 0.95  # edits of comments and names are right, most others are not


def test_two_hundred_data_files(tmp_path: Path) -> None:
    model = describe(tiny_config(), "tiny")
    rng = random.Random(8)

    def build(source: str) -> list[TokenSet]:
        packer = Packer(TokenReader(lambda: pytest.fail("no text"), VOCAB, 32), model, 32)
        return [packer.held_out([source], 3), packer.collect([source], 3, 0, "calibration")]

    rows = [json.dumps({"input_ids": [rng.randrange(3, VOCAB) for _ in range(32)]}) for _ in range(12)]
    for number in range(200):
        path = tmp_path / f"{number}.{rng.choice(['jsonl', 'jsonl', 'json', 'parquet'])}"
        text = mutated("\n".join(rows) + "\n", rng).encode("utf-8", "surrogatepass")
        path.write_bytes(text if rng.random() < 0.9 else bytes(rng.randrange(256) for _ in range(200)))
        for tokens in one_line_or(lambda path=path: build(str(path))) or ():
            assert tokens.tokens.min() >= 0 and tokens.tokens.max() < VOCAB and tokens.scored.any(axis=1).all()


def test_a_hundred_model_folders(tmp_path: Path, model_folder: Path) -> None:
    """What loads has every weight from the file; odd values in config.json are one line."""
    rng, whole = random.Random(9), (model_folder / "model.safetensors").read_bytes()
    odd = [None, "", "a", -1, 0, 1.5, 10**9, [], {}, ["full"], True, float("nan"), "FFFFFF", [None] * 6]
    for number in range(100):
        folder = tmp_path / str(number)
        shutil.copytree(model_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        kind = rng.randrange(4)
        if kind == 0:
            config[rng.choice(list(config))] = rng.choice(odd)
            config[rng.choice(["cli_factor", "indexer_types", "index_topk_pattern", "auto_map"])] = rng.choice(odd)
            (folder / "config.json").write_text(json.dumps(config))
        elif kind == 1:
            (folder / "config.json").write_text(mutated(json.dumps(config), rng), encoding="utf-8")
        elif kind == 2:
            (folder / "model.safetensors").write_bytes(whole[: rng.randrange(len(whole))])
        else:
            place = rng.randrange(4000)
            (folder / "model.safetensors").write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        one_line_or(lambda f=folder: Checkpoint.read(str(f)))
        one_line_or(lambda f=folder: read_config(str(f)))
        if kind > 1:
            one_line_or(lambda f=folder: TransformersEngine.load(str(f), "cpu"))
            assert kind == 3 or one_line_or(lambda f=folder: TransformersEngine.load(str(f), "cpu")) is None


# -- servers


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that treats each connection as `answer` does."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                continue
            with connection:
                try:
                    connection.settimeout(5)
                    connection.recv(65536)
                    answer(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        thread.join()
        listener.close()


RIGHT = {
    "internal_states": [{"indexcache": {"fingerprint": "a" * 64}}],
    "ranks": [],
    "data": [{"id": "m"}],
    "choices": [],
}


def test_two_hundred_answers_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexcache_search.engines.calibration_client.BUSY_SECONDS", 0.2)
    rng = random.Random(10)
    current: list[bytes] = [b""]
    with server(lambda connection: connection.sendall(current[0])) as url:
        for _ in range(200):
            body = mutated(json.dumps(RIGHT), rng).encode("utf-8", "surrogatepass")
            code = rng.choice([200, 200, 200, 200, 204, 301, 302, 307, 401, 404, 409, 500, 502])
            head = f"HTTP/1.1 {code} X\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            cut = [
                head + body[: len(body) // 2],
                b"SSH-2.0-OpenSSH_9.2\r\n",
                b"",
                b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 9000,
            ]
            current[0] = rng.choice([head + body] * 6 + cut)
            one_line_or(lambda: servers.ranks(url))
            one_line_or(lambda: Endpoint(url).logprobs([1, 2, 3]))
            lost = (IndexCacheError, ServerLostError, ServerBusyError)
            one_line_or(lambda: CalibrationServer(url).status(), lost)
            one_line_or(lambda: CalibrationServer(url).logprobs([[1, 2, 3]], 1), lost)


def test_an_answer_is_bounded_in_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    form: TypeAdapter[Any] = TypeAdapter(Any)

    def drip(connection: socket.socket) -> None:
        for letter in b"HTTP/1.1 200 OK\r\n\r\n" * 100:
            connection.sendall(bytes([letter]))
            time.sleep(0.05)

    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    def chunks(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"1\r\n \r\n" * 100)

    def hints(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)

    slow = "gave [0-9]+ bytes in 0.3 s and more, and no whole answer"
    cases = [(drip, 1.0, 8.0, "gave no whole answer within 1 s"), (drip, 300.0, 0.3, slow)]
    cases += [(answer, 300.0, 8.0, "answers with more than 100000 bytes") for answer in (flood, chunks, hints)]
    for answer, seconds, begun, message in cases:
        monkeypatch.setattr(connection, "BEGUN_SECONDS", begun)
        with server(answer) as url, pytest.raises(client.NoAnswerError, match=message):
            client.ask(url, "/", form, seconds=seconds, max_bytes=100_000)


def test_the_key_stays_with_the_server_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.KEY_VARIABLE, "secret")
    heard: list[bytes] = []

    def listen(connection: socket.socket) -> None:
        heard.append(b"something")
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    form: TypeAdapter[Any] = TypeAdapter(Any)
    with server(listen) as other:
        for code in (301, 302, 303, 307, 308):
            head = f"HTTP/1.1 {code} X\r\nLocation: {other}/\r\nContent-Length: 0\r\n\r\n".encode()
            with server(lambda connection, head=head: connection.sendall(head)) as url:
                for body in (None, {"a": 1}):
                    with pytest.raises(client.StatusError, match="redirects are not followed"):
                        client.ask(url, "/", form, body)
    assert not heard


# -- file systems


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_failing_file_systems(
    count: int, tmp_path: Path, model_folder: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the operating system says, at whichever write: one line, exit code 2, and no half-written result."""
    rng = random.Random(11)
    errors = [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT]
    replace, fsync = Path.replace, os.fsync
    base = ["--model", str(model_folder), "--calibration", str(token_file), "--seq-len", "32", "--device", "cpu"]
    base += ["--num-sequences", "2", "--num-eval-sequences", "2", "--retain", "1/2", "--strategy", "uniform"]
    for number in range(count):
        output, code, left = tmp_path / str(number), errors[number % len(errors)], [rng.randrange(30)]

        def fail(*args: Any, _code: int = code, _left: list[int] = left, _real: Any = None, **kwargs: Any) -> Any:
            _left[0] -= 1
            if _left[0] < 0:
                raise OSError(_code, os.strerror(_code))
            return _real(*args, **kwargs)

        monkeypatch.setattr(Path, "replace", lambda *a, f=fail, **k: f(*a, _real=replace, **k))
        monkeypatch.setattr(os, "fsync", lambda *a, f=fail, **k: f(*a, _real=fsync, **k))
        result = CliRunner().invoke(search_app, [*base, "--output", str(output)])
        monkeypatch.undo()
        lines = [line for line in result.stderr.splitlines() if line.startswith("indexcache-search: ")]
        assert result.exit_code in (0, 2), result.output
        assert len(lines) == (result.exit_code == 2) and "Traceback" not in result.output
        for path in output.glob("pattern*.yaml"):
            PatternFile.load(path)


def raising(error: Exception) -> Callable[..., None]:
    """A function that only raises."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of journals and weights; the operating system names no file that it can't write to."""
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with open(tmp_path / "journal.jsonl", "wb") as file, pytest.raises(OSError, match=r"journal\.jsonl"):
        append(file, Sealer(), {"a": 1})
    with pytest.raises(OSError) as caught, naming(tmp_path / "w.safetensors"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert exit_line(caught.value) == (f"{tmp_path / 'w.safetensors'}: No space left on device", 2)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_memory_is_one_line(error: Exception) -> None:
    """As allocators, loaders and threads say it, and where something else was raised of it."""
    wrapped = RuntimeError("while that was handled")
    wrapped.__context__ = error
    for found in (error, wrapped):
        line, code = exit_line(found)
        assert code == 2 and line.startswith("out of memory") and "\n" not in line


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "large", "nothing", "long"])
def test_files_that_are_none(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/zero"), "folder": tmp_path, "long": tmp_path / ("x" * 300)}.get(kind, tmp_path / "x")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b"#" * (1 << 21))
    for spec in (str(path), f"{path}@1/4", f"{path}@1e-999999999"):
        assert one_line_or(lambda spec=spec: PatternFile.load(spec)) is None
    assert one_line_or(lambda: atomic.read_json_object(path, 1 << 20)) is None


def test_what_nobody_thought_of_is_one_line_and_a_file(
    tmp_path: Path, model_folder: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("indexcache_search.searching.search.Search.find", fail)
    base = ["--model", str(model_folder), "--calibration", str(token_file), "--seq-len", "32", "--device", "cpu"]
    base += ["--num-sequences", "2", "--num-eval-sequences", "2", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(search_app, base)
    [line] = [item for item in result.stderr.splitlines() if "unforeseen" in item]
    assert result.exit_code == 70 and line.startswith("indexcache-search: unforeseen while search: KeyError: 'a bug' (")
    path = Path(line.partition("traceback in ")[2].partition(";")[0])
    assert "Traceback" in path.read_text() and "a bug" in path.read_text()
    path.unlink()
