"""Prefill and decode apart: real transfers between two servers, by Mooncake over TCP, and SGLang's router before them.

Neither is a part of the test environment: `pip install mooncake-transfer-engine-non-cuda sglang-router`, and the
libraries libibverbs1 and librdmacm1 (both of Debian) for Mooncake.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

pytest.importorskip("sglang")
pytest.importorskip("mooncake.engine", exc_type=ImportError)

from indexcache_search.engines.own_server import free_port
from scripts.tools import random_models
from scripts.tools.inprocess import Served
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.process import die_with_parent
from tests.live.server import START_TIMEOUT, Server, environment, running
from tests.live.test_combinations import STEPS, prompts
from tests.live.test_server import states

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PATTERN = Pattern("FSSFSS")
SAMPLING = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server, where they find each other, and what one server alone answers."""

    prefill: Server
    decode: Server
    bootstrap: int
    expected: list[Served]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, port = tmp_path_factory.mktemp("pair"), free_port()
    model = random_models.build("glm-moe", folder / "model")
    file = write_pattern(PATTERN, model, folder / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--skip-tokenizer-init", "--chunked-prefill-size", "256")
    with running(model, folder / "alone", *flags) as server:
        expected = [served for served, _ in server.generate(prompts(), list("abcde"), STEPS, inputs=False)]
    apart = ("--disaggregation-transfer-backend", "mooncake", "--disaggregation-bootstrap-port", str(port))
    apart += ("--host", "127.0.0.1", "--disaggregation-mode")
    # under the overlap schedule, what is sent early of a prefix waits for a CUDA event
    prefill = (*flags, *apart, "prefill", "--disable-overlap-schedule")
    with (
        running(model, folder / "prefill", *prefill, MOONCAKE_PROTOCOL="tcp") as one,
        running(model, folder / "decode", *flags, *apart, "decode", MOONCAKE_PROTOCOL="tcp") as other,
    ):
        yield Pair(one, other, port, expected)


def served(prompt: list[int], answer: dict[str, Any]) -> Served:
    logprobs = tuple(entry[0] for entry in answer["meta_info"]["output_token_logprobs"])
    return Served((*prompt, *answer["output_ids"]), len(prompt), logprobs)


def check(found: list[Served], expected: list[Served]) -> None:
    for one, wanted in zip(found, expected, strict=True):
        assert one.ids == wanted.ids and one.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_servers_apart_answer_as_one(pair: Pair) -> None:
    """A router sends a request to both, too. The last prompt begins as an earlier one does."""
    counted = [state["counted"] for state in states(pair.prefill) + states(pair.decode)]
    assert counted == [{"passes": {"extend": 1}}, {"passes": {"decode": 1}}]
    found = []
    for number, prompt in enumerate(prompts()):
        body = {
            "input_ids": [prompt],
            "rid": [f"asked-{number}"],
            "sampling_params": SAMPLING,
            "return_logprob": True,
            "bootstrap_host": ["127.0.0.1"],
            "bootstrap_port": [pair.bootstrap],
            "bootstrap_room": [number + 1],
        }
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.post, "/generate", **body) for server in (pair.prefill, pair.decode)]
        found.append(served(prompt, asked[1].result()[0]))
    check(found, pair.expected)


@contextmanager
def router(pair: Pair, log: Path) -> Iterator[Server]:
    port = str(free_port())
    both = ("--prefill", pair.prefill.url, str(pair.bootstrap), "--decode", pair.decode.url)
    line = ("-m", "sglang_router.launch_router", "--pd-disaggregation", *both, "--host", "127.0.0.1", "--port", port)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *line], stdout=output, stderr=output, env=environment(), preexec_fn=die_with_parent
        )
    server, end = Server(f"http://127.0.0.1:{port}", log), time.monotonic() + START_TIMEOUT
    try:
        while True:
            try:
                server.get("/readiness")  # /health answers before the servers are registered
                break
            except URLError:
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
                time.sleep(0.5)
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(find_spec("sglang_router") is None, reason="sglang-router is not installed")
def test_the_router_in_front_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    with router(pair, tmp_path / "log") as server:
        found = [
            served(prompt, server.post("/generate", input_ids=prompt, sampling_params=SAMPLING, return_logprob=True))
            for prompt in prompts()
        ]
    check(found, pair.expected)
