"""A pattern together with other features of SGLang: greedy tokens and logprobs as without them, and indexers counted.

docs/reference/compatibility.md says what runs, what is refused and what nobody ran; here is what runs on CPUs.
"""

from __future__ import annotations

import json
import operator
import random
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from indexcache_search import demo
from scripts.bench.serving.soak import KINDS, Storm
from scripts.tools import random_models
from scripts.tools.inprocess import Served
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.override import to_sglang
from sglang_indexcache.io.messages import RAN_INDEXER
from sglang_indexcache.serving.counted import SHORT
from tests.live.server import LAUNCHER, REQUEST_TIMEOUT, Server, command, ended, running
from tests.live.test_server import PLAIN, states

pytestmark = pytest.mark.sglang

PATTERN = Pattern("FSSFSS")
TWO = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
DRAFTS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "3", "--speculative-dsa-topk-backend", "torch"),
)
DATA_PARALLEL = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
CONTEXT = ("--tp-size", "2", "--attn-cp-size", "2", "--enable-prefill-cp", "--cp-strategy", "interleave")
# Decode context parallelism attends through TRT-LLM's kernels alone.
DECODE_CONTEXT = (
    *("--tp-size", "2", "--dcp-size", "2", "--dsa-prefill-backend", "trtllm", "--dsa-decode-backend", "trtllm"),
)
STEPS = 8
INDEX_KEY = 128 + 4  # bytes of a token in a layer: the key in fp8, and its scale
INTERPRETED = {"TRITON_INTERPRET": "1"}  # drafts and contexts are handled by Triton kernels
TARGET, DRAFT = {"extend", "target verify"}, {"extend", "decode", "draft extend"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with a NextN layer."""
    return random_models.with_nextn(random_models.build("glm-moe", tmp_path_factory.mktemp("glm") / "model"))


@pytest.fixture(scope="module")
def flags(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    file = write_pattern(PATTERN, folder, tmp_path_factory.mktemp("pattern") / "pattern.yaml")
    return ("--indexcache-pattern", file, "--skip-tokenizer-init", "--chunked-prefill-size", "256")


@dataclass(frozen=True)
class Expected:
    """What a server without any other feature answers; it is proven against transformers in test_server.py.

    Attributes:
        answers: to `prompts`.
        crowd: the ids that it answers to `crowd`.
    """

    answers: list[Served]
    crowd: list[list[int]]


@pytest.fixture(scope="module")
def expected(folder: Path, flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Expected:
    with running(folder, tmp_path_factory.mktemp("plain") / "log", *flags) as server:
        [found] = counted(server)
        assert {*found["passes"]} - {SHORT} == {"decode", "extend"} and "to_come" not in found
        assert found["longest_prompt"] == random_models.TOPK + 128  # of the warm-up
        return Expected(answers(server), crowd(server))


def crowd(server: Server) -> list[list[int]]:
    """Ids that are decoded while other prompts are read; without logprobs, with which SGLang mixes nothing."""
    rng = random.Random(11)
    asked = [[rng.randrange(2, random_models.VOCAB) for _ in range(rng.randrange(100, 700))] for _ in range(20)]

    def ask(prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        found: list[int] = server.post("/generate", input_ids=prompt, sampling_params=sampling)["output_ids"]
        return found

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(ask, asked))


def prompts() -> list[list[int]]:
    """Some longer than a chunk, one with the beginning of another."""
    rng = random.Random(7)
    found = [[rng.randrange(2, random_models.VOCAB) for _ in range(length)] for length in (300, 40, 130, 7)]
    return [*found, found[0][:200] + found[2][:50]]


def answers(server: Server) -> list[Served]:
    """Answers of all prompts, two at a time, among requests that are aborted; the last one is behind a prefix hit."""

    def ask(number: int) -> tuple[Served, int]:
        [found] = server.generate([asked[number]], [f"asked-{number}"], STEPS, inputs=False)
        return found

    def abort(number: int) -> None:
        body, kind = json.dumps({"rid": f"aborted-{number}"}).encode(), {"content-type": "application/json"}
        urlopen(Request(server.url + "/abort_request", body, kind), timeout=REQUEST_TIMEOUT).close()

    asked = prompts()
    with ThreadPoolExecutor(4) as pool:
        lost = [pool.submit(server.generate, [asked[number]], [f"aborted-{number}"], 500) for number in (1, 2)]
        found = list(pool.map(ask, range(len(asked) - 1)))
        while not all(request.done() for request in lost):
            list(pool.map(abort, (1, 2)))
    last = [ask(len(asked) - 1) for _ in range(2)]  # one of them for each data-parallel rank, if there are two
    found.append(max(last, key=operator.itemgetter(1)))
    assert found[-1][1] > 100, "no prefix hit"
    return [served for served, _ in found]


def counted(server: Server) -> list[dict[str, Any]]:
    found = states(server)
    assert all(state["proven"] and state["pattern"] == PATTERN.roles for state in found)
    for state in found:  # a pipeline stage has some of the layers
        saved, weights = state["saved_kv_bytes_per_token"], state["saved_weight_bytes"]
        assert saved in (4 * INDEX_KEY, 2 * INDEX_KEY) and weights > 0 and state["prompt_score_bytes"] > 0
    return [state["counted"] for state in found]


def check(server: Server, expected: Expected, kinds: set[str]) -> None:
    """Every scheduler has counted these kinds of passes, before any request of ours; then tokens and logprobs."""
    assert all(set(item["passes"]) - {SHORT} == kinds and "to_come" not in item for item in counted(server))
    for served, wanted in zip(answers(server), expected.answers, strict=True):
        assert served.ids == wanted.ids
        assert served.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


CELLS = {
    "mtp": (DRAFTS, TARGET | DRAFT),
    "data-parallel-attention": (DATA_PARALLEL, {"extend", "decode"}),
    "data-parallel-attention-anew": (("--tp-size", "2", "--attn-dp-size", "2"), {"extend", "decode"}),
    "experts": (("--tp-size", "2", "--ep-size", "2"), {"extend", "decode"}),
    "pipeline": (("--pp-size", "2"), {"extend", "decode"}),
    "context": (CONTEXT, {"extend", "decode"}),
    "context-decoding": ((*CONTEXT, "--enable-cp-decode-attn-tp"), {"extend", "decode"}),
    "decode-context": (DECODE_CONTEXT, {"extend", "decode"}),
    "everything": ((*DATA_PARALLEL, "--enable-dp-lm-head", "--ep-size", "2", *DRAFTS), TARGET | DRAFT),
}
FAST = ("mtp", "everything")
LINES = {"context-decoding": "Enable CP decode attention TP", "decode-context": "DCP enabled, dcp_size=2"}  # SGLang's


@pytest.mark.parametrize("cell", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CELLS])
def test_it_serves_what_it_serves_alone(
    cell: str, folder: Path, flags: tuple[str, ...], expected: Expected, tmp_path: Path
) -> None:
    more, kinds = CELLS[cell]
    with running(folder, tmp_path / "log", *flags, *more, **how(more)) as server:
        check(server, expected, kinds)
    log = (tmp_path / "log").read_text()
    assert all((line in log) == (cell == name) for name, line in LINES.items())


def test_chunks_in_which_others_decode(
    folder: Path, flags: tuple[str, ...], expected: Expected, tmp_path: Path
) -> None:
    """In mixed passes S layers attend to what the F layer below selected, for rows of prompts and decoded ones."""
    record = tmp_path / "record"
    record.mkdir()
    more = ("--enable-mixed-chunk", "--chunked-prefill-size", "192")
    with running(folder, tmp_path / "log", *flags, *more, DSA_CPU_RECORD=str(record)) as server:
        assert crowd(server) == expected.crowd
    rows = [(run, Counter(run.requests).values()) for run in recorder.read(record)]
    mixed = [
        run for run, counts in rows if run.mode == "EXTEND" and min(counts) == 1 < max(counts)
    ]  # as SGLang calls it
    assert {run.layer for run in mixed} == {*PATTERN.full_layers} and len(mixed) >= 10
    assert all(run.selected is not None for run in mixed)


@pytest.mark.slow
def test_structured_output_is_that_of_sglangs_own_switch(tmp_path: Path) -> None:
    """The demo, which has a tokenizer: prompts of about 160 and 30 tokens, of which a layer selects 64."""
    pattern = Pattern("FSSFSSFSFSSSSSSS")
    switch = ("--json-model-override-args", json.dumps(to_sglang(pattern)))
    text, found = "The old man and the sea. " * 20, []
    for own, launcher in ((("--indexcache-pattern", pattern.letters), LAUNCHER), (switch, PLAIN)):
        with running(demo.MODEL, tmp_path / "log", *own, launcher=launcher) as server:
            sampling = {"temperature": 0, "max_new_tokens": 12, "regex": "[A-Z][a-z]{3,8} [0-9]{2}"}
            answers = server.post("/generate", text=[text, text[:100]], sampling_params=sampling, return_logprob=True)
        found.append([(item["text"], item["meta_info"]["output_token_logprobs"]) for item in answers])
    assert found[0] == found[1]
    assert all(re.fullmatch(r"[A-Z][a-z]{3,8} [0-9]{2}", answer) for answer, _ in found[0])


FAULTS = {
    "verify": (DRAFTS, f"layer 3 {RAN_INDEXER} 0 times in a pass (target verify), expected 1"),
    "verify-shared": (DRAFTS, f"layer 4 {RAN_INDEXER} 1 times in a pass (target verify), expected 0"),
    "context": (CONTEXT, f"layer 3 {RAN_INDEXER} 0 times in a pass (extend), expected 1"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name == "verify" else pytest.mark.slow) for name in FAULTS]
)
def test_an_indexer_that_runs_otherwise_ends_the_server(fault: str, folder: Path, flags: tuple[str, ...]) -> None:
    more, line = FAULTS[fault]
    code, lines = ended(command(folder, *flags, *more), DSA_CPU_BREAK=fault, **how(more))
    assert code != 0 and set(lines) == {f"indexcache: {line}"}


@pytest.mark.parametrize("broken", ["", pytest.param("updated", marks=pytest.mark.slow)])
def test_indexers_are_counted_again_after_an_update(
    broken: str, folder: Path, flags: tuple[str, ...], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with running(folder, log, *flags, **({"DSA_CPU_BREAK": broken} if broken else {})) as server:
        assert "to_come" not in counted(server)[0]
        assert server.post("/update_weights_from_disk", model_path=str(folder))["success"]
        assert counted(server) == [{"passes": {}, "to_come": ["extend"]}]
        if broken:
            with pytest.raises(OSError):
                server.generate([prompts()[1]], ["one"], 2)
            assert f"indexcache: layer 3 {RAN_INDEXER} 0 times in a pass (extend), expected 1" in log.read_text()
            return
        server.generate([[5, 6, 7]], ["short"], 2)
        assert counted(server) == [{"passes": {SHORT: 1, "decode": 1}, "to_come": ["extend"]}]
        server.generate([prompts()[1]], ["one"], 2)
        assert counted(server) == [{"passes": {SHORT: 1, "decode": 1, "extend": 1}, "longest_prompt": 40}]


def test_a_storm_of_requests(folder: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Aborted, disconnected, malformed, too long ones among others; the script has been run with a thousand."""
    with running(folder, tmp_path / "log", *flags, "--enable-metrics") as server:
        storm = Storm(server.url, random_models.VOCAB, longest=300, context=4096)
        storm.run(requests=200, at_once=24)
    assert storm.problems == [] and set(storm.counts) >= {*KINDS}


def test_without_a_warm_up_the_first_request_is_counted(folder: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", *flags, "--skip-server-warmup") as server:
        [before] = counted(server)
        assert "decode" in before["to_come"]  # a look at /health may have been a prompt
        server.generate([prompts()[1]], ["one"], 2)
        [after] = counted(server)
        assert {*after["passes"]} - {SHORT} == {"decode", "extend"} and "to_come" not in after


def how(more: Sequence[str]) -> dict[str, str]:
    """The environment of a server with these flags."""
    changes = INTERPRETED if {DRAFTS[0], CONTEXT[2], DECODE_CONTEXT[2]} & {*more} else {}
    return changes | (TWO if {"--tp-size", "--pp-size"} & {*more} else {})
