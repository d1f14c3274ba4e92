"""Several nodes: a group of processes each, which meet the other one over this machine's loopback address."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from indexcache_search import demo
from indexcache_search.engines.own_server import free_port
from scripts.tools import random_models
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.check import main as check_main
from tests.live.calibrating import CHUNK, finished, search, wait_for_evaluations
from tests.live.reference import load_reference
from tests.live.server import (
    FLAGS,
    LAUNCHER,
    START_TIMEOUT,
    Process,
    Server,
    command,
    environment,
    kill_group,
    running,
    start,
)
from tests.live.test_server import check_modes, random_prompts, states

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def flags_of(file: str, size: str) -> tuple[str, ...]:
    """Flags that both nodes share: a rank on each of them."""
    shared = ("--indexcache-pattern", file, "--chunked-prefill-size", "128", "--skip-tokenizer-init", size, "2")
    return (*shared, "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")


@contextmanager
def second_node(model: Path, log: Path, *flags: str, **changes: str) -> Iterator[Process]:
    """The node that begins, and waits for the first one."""
    line = command(model, *flags, "--node-rank", "1", "--port", str(free_port()))
    process = start(line, log, **CORES, **changes)
    try:
        yield process
    finally:
        kill_group(process)


@pytest.mark.parametrize(
    ("size", "kind", "letters", "layers"),
    [
        ("--tp-size", "glm-moe", "FSFSSF", [{0, 2, 5}, {0, 2, 5}]),
        ("--pp-size", "deepseek-v3.2", "FFSSFS", [{0, 1}, {4}]),
    ],
)
def test_ranks_of_two_nodes_run_what_the_reference_computes(
    tmp_path: Path, size: str, kind: str, letters: str, layers: list[set[int]]
) -> None:
    """Chunks, batches, decoding and prefix hits as on one node, proven by both, and nothing else ran on either."""
    model, pattern, record = random_models.build(kind, tmp_path / "model"), Pattern(letters), tmp_path / "record"
    record.mkdir()
    file = write_pattern(pattern, model, tmp_path / "pattern.yaml")
    flags, changes = flags_of(file, size), {"DSA_CPU_RECORD": str(record)}
    with (
        second_node(model, tmp_path / "second", *flags, **changes),
        running(model, tmp_path / "first", *flags, "--node-rank", "0", **CORES, **changes) as server,
    ):
        check_modes(server, load_reference(model), pattern, record, random_prompts())
        ran: dict[int, set[int]] = {}
        for run in recorder.indexers(recorder.read(record)):
            ran.setdefault(run.process, set()).add(run.layer)
        assert sorted(ran.values(), key=min) == layers
        [state] = states(server)
        assert state["fingerprint"] == pattern.fingerprint and state["proven"]
        assert check_main([file, "--server", server.url]) == 0
        for log in ("first", "second"):
            assert "and 2 rank(s)" in (tmp_path / log).read_text()


@pytest.mark.parametrize("serves", [False, True], ids=["while it loads", "while it serves"])
def test_a_node_that_is_killed_ends_the_other_one(tmp_path: Path, serves: bool) -> None:
    """Half a server is never ready, and none answers a request alone."""
    model = random_models.build("glm-dense", tmp_path / "model")
    flags = flags_of(write_pattern(Pattern("FSFSSF"), model, tmp_path / "pattern.yaml"), "--tp-size")
    log, port = tmp_path / "second", free_port()
    with second_node(model, log, *flags) as second, ExitStack() as stack:
        line = command(model, *flags, "--node-rank", "0", "--port", str(port))
        first = start(line, tmp_path / "first", **CORES)
        stack.callback(kill_group, first)
        server, end = Server(f"http://127.0.0.1:{port}", tmp_path / "first"), time.monotonic() + START_TIMEOUT
        while not (is_ready(server) if serves else "Load weight begin" in log.read_text()):
            assert first.poll() is None and second.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.05)
        kill_group(second)
        if serves:
            with pytest.raises(OSError):
                server.generate([[5] * 100], ["alone"], steps=4)
        while first.poll() is None:
            assert time.monotonic() < end, server.log.read_text()[-4000:]
            assert serves or not is_ready(server)
            time.sleep(0.5)
        assert first.wait() != 0


def is_ready(server: Server) -> bool:
    """Whether the server says so."""
    with suppress(OSError):
        return bool(server.get("/health") or True)
    return False


ENGINES_DIFFER = 1e-4  # nats a token


def searching(folder: Path) -> tuple[list[str], subprocess.Popen[bytes]]:
    """A search whose own server spans two nodes, once it has said what the second one runs."""
    flags = (*FLAGS, "--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK), "--tp-size", "2", "--nnodes", "2")
    line = search(folder / "out", *flags, "--dist-init-addr", f"127.0.0.1:{free_port()}", objective="kl")
    log = folder / "said"
    with log.open("wb") as output:
        process = subprocess.Popen(line, env=environment(**CORES), stdout=output, stderr=subprocess.STDOUT)
    end, mark = time.monotonic() + START_TIMEOUT, "with its own --node-rank: python -m "
    while mark not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    said = log.read_text().partition(mark)[2].splitlines()[0]
    return ["-m", *shlex.split(said)], process


@contextmanager
def the_other_node(line: list[str], log: Path, model: Path | None = None) -> Iterator[Process]:
    """What a search says that the second node runs, with a port of its own where the first one is the same machine."""
    if model is not None:
        line = [*line, "--model-path", str(model)]
    process = start([LAUNCHER[0], *line, "--port", str(free_port())], log, **CORES)
    try:
        yield process
    finally:
        kill_group(process)


def test_a_search_over_two_nodes_finds_what_it_finds_here(tmp_path: Path) -> None:
    """A node that is lost ends no search for good: both are started again, and the same command goes on."""
    line, process = searching(tmp_path)
    with the_other_node(line, tmp_path / "second") as second:
        wait_for_evaluations(tmp_path / "out", 8, process)
        kill_group(second)
        said, end = tmp_path / "said", time.monotonic() + START_TIMEOUT
        while "lost http://127.0.0.1" not in said.read_text():
            assert process.poll() is None and time.monotonic() < end, said.read_text()
            time.sleep(0.1)
        process.terminate()
        assert process.wait(START_TIMEOUT) == 143
    evaluated = (tmp_path / "out" / "work" / "journal.jsonl").read_text().count("\n")
    line, process = searching(tmp_path)
    with the_other_node(line, tmp_path / "second") as second:
        assert process.wait(START_TIMEOUT) == 0, (tmp_path / "said").read_text()
        assert second.wait(START_TIMEOUT) is not None  # it ends with the search
    journal = (tmp_path / "out" / "work" / "journal.jsonl").read_text()
    assert evaluated >= 8 and len(set(journal.splitlines())) == journal.count("\n")

    finished([*search(tmp_path / "here", objective="kl"), "--engine", "transformers"], tmp_path / "here.log")
    found, wanted = (PatternFile.load(tmp_path / name / "pattern.yaml") for name in ("out", "here"))
    assert [step.layer for step in found.trajectory] == [step.layer for step in wanted.trajectory]
    for mine, theirs in zip(found.trajectory, wanted.trajectory, strict=True):
        assert mine.pattern_loss == pytest.approx(theirs.pattern_loss, abs=ENGINES_DIFFER)


def test_a_node_that_loads_another_model_ends_the_search(tmp_path: Path) -> None:
    """The same architecture and config.json: losses would be of weights that nobody has."""
    other = shutil.copytree(demo.MODEL, tmp_path / "other")
    with next(other.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    line, process = searching(tmp_path)
    with the_other_node(line, tmp_path / "second", other):
        assert process.wait(START_TIMEOUT) == 2
    wanted = "rank 1 and rank 0 don't calibrate the same files of a model; expected the same on every node"
    assert wanted in " ".join((tmp_path / "said").read_text().split())
    assert not (tmp_path / "out" / "pattern.yaml").exists()
