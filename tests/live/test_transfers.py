"""Prefill and decode apart: real transfers between two servers, by Mooncake over TCP.

Mooncake is no part of the test environment: `pip install mooncake-transfer-engine-non-cuda`, and the libraries
libibverbs1 and librdmacm1 (both of Debian).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("sglang")
pytest.importorskip("mooncake.engine", exc_type=ImportError)

from indexcache_search.engines.own_server import free_port
from scripts.tools import random_models
from scripts.tools.inprocess import Served
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from tests.live.server import Server, running
from tests.live.test_combinations import STEPS, prompts
from tests.live.test_server import states

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PATTERN = Pattern("FSSFSS")


def transferred(prefill: Server, decode: Server, bootstrap: int, prompt: list[int], number: int) -> Served:
    """What both servers answer to one request; a router sends it to both, too."""
    body = {
        "input_ids": [prompt],
        "rid": [f"asked-{number}"],
        "sampling_params": {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True},
        "return_logprob": True,
        "bootstrap_host": ["127.0.0.1"],
        "bootstrap_port": [bootstrap],
        "bootstrap_room": [number + 1],
    }
    with ThreadPoolExecutor(2) as pool:
        _, [answer] = pool.map(lambda server: server.post("/generate", **body), (prefill, decode))
    logprobs = tuple(entry[0] for entry in answer["meta_info"]["output_token_logprobs"])
    return Served((*prompt, *answer["output_ids"]), len(prompt), logprobs)


def test_servers_apart_answer_as_one(tmp_path: Path) -> None:
    model = random_models.build("glm-moe", tmp_path / "model")
    file, port = write_pattern(PATTERN, model, tmp_path / "pattern.yaml"), free_port()
    flags = ("--indexcache-pattern", file, "--skip-tokenizer-init", "--chunked-prefill-size", "256")
    with running(model, tmp_path / "alone", *flags) as server:
        expected = [served for served, _ in server.generate(prompts(), list("abcde"), STEPS, inputs=False)]
    apart = ("--disaggregation-transfer-backend", "mooncake", "--disaggregation-bootstrap-port", str(port))
    apart += ("--host", "127.0.0.1", "--disaggregation-mode")
    # under the overlap schedule, what is sent early of a prefix waits for a CUDA event
    prefill = (*flags, *apart, "prefill", "--disable-overlap-schedule")
    with (
        running(model, tmp_path / "prefill", *prefill, MOONCAKE_PROTOCOL="tcp") as one,
        running(model, tmp_path / "decode", *flags, *apart, "decode", MOONCAKE_PROTOCOL="tcp") as other,
    ):
        assert [state["counted"] for state in states(one) + states(other)] == [
            {"passes": {"extend": 1}},
            {"passes": {"decode": 1}},
        ]
        found = [transferred(one, other, port, prompt, number) for number, prompt in enumerate(prompts())]
        for served, wanted in zip(found, expected, strict=True):
            assert served.ids == wanted.ids and served.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
