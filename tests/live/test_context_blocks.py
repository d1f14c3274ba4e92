"""Layers that select in blocks under context-parallel prefill, in real SGLang: all rows are the definition's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from extras.dense.tests.live.selecting import passes, random_prompts, serve_a_branch
from scripts.tools import random_models
from scripts.tools.inprocess import Served
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from tests.live.reference import load_reference
from tests.live.server import REQUEST_TIMEOUT, Server, running
from tests.live.test_blocks import check_blocks
from tests.live.test_server import states

pytestmark = pytest.mark.sglang

INTERPRETED = {"TRITON_INTERPRET": "1"}
BLOCKS = "FSFFSF+2q4+3q4"
DECODING = "Enable CP decode attention TP"  # SGLang's line


def context(ranks: int) -> tuple[str, ...]:
    return ("--attn-cp-size", str(ranks), "--enable-prefill-cp", "--cp-strategy", "interleave")


@pytest.mark.parametrize(
    ("ranks", "of_context", "letters", "grouped", "more"),
    [
        (2, 2, BLOCKS, 3, ()),
        pytest.param(4, 4, "FFSFSF+0q2+3q2", None, (), marks=pytest.mark.slow),
        pytest.param(4, 2, "FFSFSS+0q16+1q16", 3, (), marks=pytest.mark.slow),
        pytest.param(2, 2, BLOCKS, 3, ("--enable-cp-decode-attn-tp",), marks=pytest.mark.slow),
    ],
    ids=["cp2", "cp4", "tp2-cp2", "cp2-decoding"],
)
def test_chunks_and_a_prefix_hit(
    ranks: int, of_context: int, letters: str, grouped: int | None, more: tuple[str, ...], tmp_path: Path
) -> None:
    folder, pattern = random_models.build("glm-moe", tmp_path / "glm"), Pattern.parse(letters)
    first, second, runs = serve_a_branch(
        folder, pattern, tmp_path, 4, *context(of_context), *more, grouped=grouped, ranks=ranks, **INTERPRETED
    )
    assert (DECODING in (tmp_path / "log").read_text()) == bool(more)
    model, computed, again = load_reference(folder), passes(runs, "first"), passes(runs, "second")
    assert check_blocks(model, pattern, first, ["first"], computed, runs) > 200
    assert check_blocks(model, pattern, second, ["first", "second"], [*computed[:2], *again], runs) > 200


@contextmanager
def pairs_of_ranks(ranks: int, tmp_path: Path, *flags: str) -> Iterator[tuple[Server, Path, Path]]:
    """A server with `BLOCKS` whose contexts have two ranks each, its model, and where its selections are recorded."""
    folder, record = random_models.build("glm-moe", tmp_path / "glm"), tmp_path / "record"
    record.mkdir()
    file = write_pattern(Pattern.parse(BLOCKS), folder, tmp_path / "pattern.yaml")
    own = ("--indexcache-pattern", file, "--tp-size", str(ranks), "--skip-tokenizer-init", *context(2))
    threads = "|".join("01" * (ranks // 2))
    changes = {"DSA_CPU_RECORD": str(record), "SGLANG_CPU_OMP_THREADS_BIND": threads, **INTERPRETED}
    with running(folder, tmp_path / "log", *own, *flags, **changes) as server:
        yield server, folder, record


@pytest.mark.slow
def test_beside_data_parallel_attention(tmp_path: Path) -> None:
    """Two contexts of two ranks: prompts of different lengths in both at once, and in one while the other idles."""
    prompts = dict(zip(("long", "short", "alone"), random_prompts(600, 201, 333), strict=True))
    two = ("--dp-size", "2", "--enable-dp-attention", "--chunked-prefill-size", "512")
    with pairs_of_ranks(4, tmp_path, *two) as (server, folder, record):
        for state in states(server):
            assert state["proven_ranks"] == 4 and (state["context_layers"], state["context_ranks"]) == (2, 2)

        def ask(name: str, rank: int) -> Served:
            [(served, _)] = server.generate([prompts[name]], [name], steps=6, routed_dp_rank=rank)
            return served

        with ThreadPoolExecutor(2) as pool:
            answers = dict(zip(("long", "short"), pool.map(ask, ("long", "short"), (0, 1)), strict=True))
        answers["alone"] = ask("alone", 1)
        runs = recorder.read(record)
    of = {name: {run.process for run in runs if name in run.requests} for name in prompts}
    assert of["short"] == of["alone"] and not of["long"] & of["short"] and {len(found) for found in of.values()} == {2}
    model, pattern = load_reference(folder), Pattern.parse(BLOCKS)
    for name, served in answers.items():
        assert check_blocks(model, pattern, served, [name], passes(runs, name), runs) > 50


@pytest.mark.slow
def test_many_requests_at_once(tmp_path: Path) -> None:
    """200 of mixed lengths, some of them aborted; every query's selection of a tenth of them is the definition's."""
    rng = random.Random(5)
    lengths = [rng.choice([rng.randrange(2, 60), rng.randrange(150, 400)]) for _ in range(200)]
    prompts = [[rng.randrange(2, random_models.VOCAB) for _ in range(length)] for length in lengths]
    with pairs_of_ranks(2, tmp_path, "--chunked-prefill-size", "256") as (server, folder, record):
        [state] = states(server)
        assert state["proven"] and (state["context_layers"], state["context_ranks"]) == (2, 2)

        def ask(number: int) -> Served:
            [(served, _)] = server.generate([prompts[number]], [f"asked-{number}"], steps=2)
            return served

        def abort(number: int) -> None:
            name = f"lost-{number}-"  # an abort is of all that begin so
            lost = pool.submit(server.generate, [prompts[number]], [name], 300)
            body, kind = json.dumps({"rid": name}).encode(), {"content-type": "application/json"}
            while not lost.done():
                urlopen(Request(server.url + "/abort_request", body, kind), timeout=REQUEST_TIMEOUT).close()

        with ThreadPoolExecutor(24) as pool:
            aborted = [pool.submit(abort, number) for number in range(0, len(prompts), 20)]
            answers = list(pool.map(ask, range(len(prompts))))
            for ending in aborted:
                ending.result()
        runs = recorder.read(record)
    model, pattern, shared = load_reference(folder), Pattern.parse(BLOCKS), 0
    for number in range(0, len(prompts), 10):
        name = f"asked-{number}"
        shared += check_blocks(model, pattern, answers[number], [name], passes(runs, name), runs)
    assert shared > 400 and any(len(set(run.requests)) > 3 for run in runs if run.mode == "EXTEND")
