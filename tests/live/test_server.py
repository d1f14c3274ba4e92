"""The HTTP server with a pattern: parity, prefix hits, chunks, batches, ranks and stages; status and metrics."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from indexcache_search import demo
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.errors import SearchError
from scripts.tools import random_models
from scripts.tools.inprocess import ARGUMENTS
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from sglang_indexcache.families import describe
from tests.fake_hub import COMMIT, FakeHub, serving
from tests.live.reference import load_reference
from tests.live.server import Server, environment, running
from tests.live.test_parity import check_parity

pytestmark = pytest.mark.sglang
CHUNK = 128  # a multiple of SGLang's page of 64


@pytest.fixture
def record(tmp_path: Path) -> Path:
    folder = tmp_path / "record"
    folder.mkdir()
    return folder


def states(server: Server) -> list[dict[str, Any]]:
    return [state.get("indexcache") for state in json.loads(server.get("/server_info"))["internal_states"]]


def metric(text: str, name: str) -> dict[str, float]:
    """Values of a metric by its labels."""
    lines = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in lines}


def check_modes(server: Server, model: Any, pattern: Pattern, record: Path, prompts: list[list[int]]) -> None:
    """Prefill in chunks, decode, a batch, and a prefix hit: logprobs, and which layers ran."""
    layers = describe(model.config.to_dict(), "reference").layers
    full_layers = {layers[letter] for letter in pattern.full_layers}
    recorder.clear(record)  # what warm-up requests left
    names = [f"batch-{index}" for index in range(len(prompts))]
    batch = server.generate(prompts, names, steps=6)
    runs = recorder.indexers(recorder.read(record))
    answers = [(served, [name]) for (served, _), name in zip(batch, names, strict=True)]
    check_parity(model, pattern, answers, runs, exact=False)
    for mode in ("EXTEND", "DECODE"):
        assert {run.layer for run in runs if run.mode == mode} == full_layers, mode
    starts = {positions_of(run, "batch-0")[0] for run in runs if run.mode == "EXTEND" and "batch-0" in run.requests}
    assert len(starts) > 1, "the prompt was not computed in chunks"
    assert any(len(set(run.requests)) > 1 for run in runs if run.mode == "DECODE"), "no batch in decode"

    [(first, _)] = server.generate(prompts[:1], ["first"], steps=2, inputs=False)
    [(again, cached)] = server.generate(prompts[:1], ["again"], steps=2, inputs=False)
    assert cached >= CHUNK and again.ids == first.ids
    runs = recorder.indexers(recorder.read(record))
    assert {run.layer for run in runs if "again" in run.requests} == full_layers
    computed = [position for run in runs for position in positions_of(run, "again")]
    assert min(computed) == cached, "the prefix was computed again"
    check_parity(model, pattern, [(again, ["batch-0", "first", "again"])], runs, exact=False)


def positions_of(run: recorder.Run, request: str) -> list[int]:
    return [position for rid, position in zip(run.requests, run.positions, strict=True) if rid == request]


def random_prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(2, random_models.VOCAB) for _ in range(length)] for length in (300, 90, 40)]


def test_the_readmes_server(tmp_path: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo with its tokenizer: completions, parity, status, metrics, and a check against the running server."""
    pattern = Pattern("FSSFSSFSFSSSSSSS")
    file = write_pattern(pattern, demo.MODEL, tmp_path / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--chunked-prefill-size", str(CHUNK), "--enable-metrics")
    with running(demo.MODEL, tmp_path / "log", *flags, DSA_CPU_RECORD=str(record)) as server:
        answer = server.post("/v1/completions", model="demo", prompt="The quick brown fox", max_tokens=8, temperature=0)
        assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["text"].strip()

        [state] = states(server)
        assert state["pattern"] == pattern.roles and state["fingerprint"] == pattern.fingerprint
        assert state["retention"] == 0.25 and state["source"] == file
        assert check_main([file, "--server", server.url]) == 0
        other = write_pattern(Pattern.full(16), demo.MODEL, tmp_path / "other.yaml")
        assert check_main([other, "--server", server.url]) == 1
        assert f"serves fingerprint {pattern.fingerprint[:16]}" in capsys.readouterr().out

        rows = [json.loads(line)["input_ids"] for line in demo.data_file("multi").open()]
        check_modes(server, load_reference(demo.MODEL), pattern, record, [rows[0][:400], rows[1][:150], rows[2][:90]])

        before = server.get("/metrics")
        [(labels, one)] = metric(before, "sglang:indexcache_info").items()
        assert one == 1 and pattern.fingerprint in labels and 'retention="0.2500"' in labels and 'tp_rank="0"' in labels
        assert sorted(metric(before, "sglang:indexcache_layers").values()) == [4, 12]
        server.generate([[5] * 100], ["counted"], steps=4)
        after = server.get("/metrics")
        grown = {}
        for name in ("sglang:indexcache_indexer_runs_total", "sglang:indexcache_indexer_skips_total"):
            [(_, old)], [(_, new)] = metric(before, name).items(), metric(after, name).items()
            grown[name] = new - old
        passes = 1 + 3  # one prefill gives the first token, three decode steps the rest
        assert list(grown.values()) == [4 * passes, 12 * passes]
        [state] = states(server)
        totals = [metric(after, f"sglang:indexcache_indexer_{name}_total").values() for name in ("runs", "skips")]
        assert [[state["indexer_runs"]], [state["indexer_skips"]]] == [list(values) for values in totals]
        capsys.readouterr()
        assert check_main([file, "--server", server.url]) == 0
        _, row, *_ = capsys.readouterr().out.splitlines()
        assert row.split()[1:6] == ["yes", "1", "4", "of", "16"] and str(state["indexer_skips"]) in row
        runs = [run for run in recorder.read(record) if "counted" in run.requests]
        assert len(runs) == 4 * passes, "the counter says what the indexers did"


def two_ranks(size_flag: str, file: str, record: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags and environment of a server whose `size_flag` is 2, a core for each rank."""
    flags = (
        "--indexcache-pattern",
        file,
        "--chunked-prefill-size",
        str(CHUNK),
        size_flag,
        "2",
        "--skip-tokenizer-init",
    )
    return flags, {"DSA_CPU_RECORD": str(record), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def test_tensor_parallel_ranks(tmp_path: Path, record: Path) -> None:
    """Two ranks choose the same tokens; without --enable-metrics nothing of ours is in /metrics."""
    model = random_models.build("glm-moe", tmp_path / "glm")
    pattern = Pattern("FSFSSF")
    file = write_pattern(pattern, model, tmp_path / "pattern.yaml")
    flags, changes = two_ranks("--tp-size", file, record)
    with running(model, tmp_path / "log", *flags, **changes) as server:
        check_modes(server, load_reference(model), pattern, record, random_prompts())
        assert len({run.process for run in recorder.read(record)}) == 2
        assert "on 6 attention modules here and 2 rank(s)" in server.log.read_text()
        with pytest.raises(HTTPError, match="404"):  # metrics are off
            server.get("/metrics")


def test_pipeline_stages_that_begin_with_a_shared_layer(tmp_path: Path, record: Path) -> None:
    """Layers 0 to 2 and 3 to 5; layer 3 is S and gets layer 2's indices from the stage before, which is S as well."""
    model = random_models.build("deepseek-v3.2", tmp_path / "deepseek")
    pattern = Pattern("FFSSFS")
    file = write_pattern(pattern, model, tmp_path / "pattern.yaml")
    flags, changes = two_ranks("--pp-size", file, record)
    with running(model, tmp_path / "log", *flags, "--enable-metrics", **changes) as server:
        check_modes(server, load_reference(model), pattern, record, random_prompts())
        layers = {run.process: set[int]() for run in recorder.read(record)}
        for run in recorder.read(record):
            layers[run.process].add(run.layer)
        assert sorted(layers.values(), key=min) == [{0, 1}, {4}]
        found = metric(server.get("/metrics"), "sglang:indexcache_layers")
        roles = {re.search(r'pp_rank="(\d)".*role="(.)"', labels).groups(): count for labels, count in found.items()}
        assert roles == {("0", "F"): 2, ("0", "S"): 1, ("1", "F"): 1, ("1", "S"): 2}


def test_data_parallel_replicas(tmp_path: Path) -> None:
    """Each replica reports for itself."""
    model = random_models.build("glm-dense", tmp_path / "glm")
    pattern = Pattern("FSFSSF")
    file = write_pattern(pattern, model, tmp_path / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--dp-size", "2", "--skip-tokenizer-init", "--enable-metrics")
    with running(model, tmp_path / "log", *flags, SGLANG_CPU_OMP_THREADS_BIND="0|1") as server:
        assert [state["fingerprint"] for state in states(server)] == [pattern.fingerprint] * 2
        assert check_main([file, "--server", server.url]) == 0
        labels = metric(server.get("/metrics"), "sglang:indexcache_info")
        assert sorted(re.findall(r'dp_rank="(\d)"', " ".join(labels))) == ["0", "1"]


PLAIN = (sys.executable, "-m", "sglang.launch_server")
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


def test_the_environment_alone_is_enough(tmp_path: Path) -> None:
    """Other launchers find the plugin by its entry point; a file of the hub is served and named at its commit."""
    model = random_models.build("glm-dense", tmp_path / "glm")
    pattern, hub = Pattern("FSSSSF"), FakeHub()
    hub.put("org/name", "pattern.yaml", Path(write_pattern(pattern, model, tmp_path / "pattern.yaml")).read_bytes())
    with ExitStack() as stack:
        changes = {"HF_ENDPOINT": stack.enter_context(serving(hub)).address, "HF_HOME": str(tmp_path / "hub")}
        changes |= {"HF_HUB_OFFLINE": "0", "SGLANG_INDEXCACHE_PATTERN": "org/name/pattern.yaml"}
        flags = ("--skip-tokenizer-init",)
        server = stack.enter_context(running(model, tmp_path / "log", *flags, launcher=SERVE, **changes))
        [state] = states(server)
        assert (state["pattern"], state["source"]) == (pattern.roles, f"org/name@{COMMIT}/pattern.yaml")
        with pytest.raises(SearchError, match="not in calibration mode"):
            CalibrationServer(server.url).switch(Pattern("FFFFFF"))  # serving never exposes it


ENGINE = """
import json, sys, sglang
if __name__ == "__main__":
    engine = sglang.Engine(model_path=sys.argv[1], skip_tokenizer_init=True, **json.loads(sys.argv[2]))
    states = engine.get_server_info()["internal_states"]
    print("STATE " + json.dumps([state.get("indexcache") for state in states]))
    engine.shutdown()
"""


def test_the_engine_of_a_python_program(tmp_path: Path) -> None:
    model = random_models.build("glm-dense", tmp_path / "glm")
    pattern = Pattern("FSSSSF")
    changes = environment(SGLANG_INDEXCACHE_PATTERN=write_pattern(pattern, model, tmp_path / "pattern.yaml"))
    (tmp_path / "program.py").write_text(ENGINE)
    arguments = [sys.executable, str(tmp_path / "program.py"), str(model), json.dumps(ARGUMENTS)]
    result = subprocess.run(arguments, env=changes, capture_output=True, text=True, timeout=600)
    [line] = [line for line in result.stdout.splitlines() if line.startswith("STATE ")]
    [state] = json.loads(line.removeprefix("STATE "))
    assert state["fingerprint"] == pattern.fingerprint
