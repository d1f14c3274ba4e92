"""Rows of prompts over tensor-parallel ranks, in real SGLang: every rank has what one rank alone selects."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from extras.dense.tests.live.selecting import passes, serve_a_branch
from scripts.tools import random_models
from scripts.tools.inprocess import Served
from sglang_indexcache import Pattern
from sglang_indexcache.io.messages import NOT_COMBINED
from tests.live.ending import launch
from tests.live.reference import load_reference
from tests.live.server import LAUNCHER, command, ended, running
from tests.live.test_blocks import check_blocks
from tests.live.test_parity import check_parity
from tests.live.test_server import metric, states

pytestmark = pytest.mark.sglang

FLAG = "--indexcache-shard-indexers"
TWO = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

# Prompts are short here; each rank notes of how many rows it selected for how many.
SCRIPT = """
import os
from sglang_indexcache.families.dsa.blocks import shards

shards.LEAST_ROWS, shards.LEAST_KEYS, shards.STRIPE = 32, 0, 8
whole = shards.Shards.part

def part(self, count, device, kept):
    found = whole(self, count, device, kept)
    with open(os.environ["TEST_SHARES"], "a") as file:
        file.write(f"{self.rank} {len(found.own)} {count}\\n")
    return found

shards.Shards.part = part
"""


@pytest.fixture
def short(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    return {"TEST_SABOTAGE": str(tmp_path / "script.py"), "TEST_SHARES": str(tmp_path / "shares")}


def shares(short: dict[str, str]) -> list[tuple[int, int, int]]:
    lines = Path(short["TEST_SHARES"]).read_text().splitlines()
    return [(int(rank), int(rows), int(count)) for rank, rows, count in map(str.split, lines)]


@pytest.mark.parametrize(
    ("kind", "letters", "grouped"),
    [("glm-moe", "FSFFSF+2q4+3q4", 3), pytest.param("hy-v4", "FFSFFS+1q4+3q4", None, marks=pytest.mark.slow)],
    ids=["glm", "hy-v4"],
)
def test_a_pattern_with_blocks(
    kind: str, letters: str, grouped: int | None, tmp_path: Path, short: dict[str, str]
) -> None:
    """Chunks and a prefix hit; exact layers, exact rows and leaders of blocks are shared out."""
    folder, pattern = random_models.build(kind, tmp_path / kind), Pattern.parse(letters)
    first, second, runs = serve_a_branch(folder, pattern, tmp_path, 4, FLAG, grouped=grouped, **short)
    model, computed, again = load_reference(folder), passes(runs, "first"), passes(runs, "second")
    assert check_blocks(model, pattern, first, ["first"], computed, runs) > 200
    assert check_blocks(model, pattern, second, ["first", "second"], [*computed[:2], *again], runs) > 200
    found = shares(short)
    assert {rank for rank, _, _ in found} == {0, 1}
    assert all(rows <= count // 2 + 8 for _, rows, count in found)


def test_no_pattern_and_many_requests_at_once(tmp_path: Path, short: dict[str, str]) -> None:
    """200 of mixed lengths; all ranks select alike, and a tenth of them is compared with transformers."""
    folder, record = random_models.build("glm-moe", tmp_path / "glm"), tmp_path / "record"
    record.mkdir()
    rng = random.Random(3)
    lengths = [rng.choice([rng.randrange(2, 60), rng.randrange(60, 300)]) for _ in range(200)]
    prompts = [[rng.randrange(2, random_models.VOCAB) for _ in range(length)] for length in lengths]
    flags = (FLAG, "--tp-size", "2", "--chunked-prefill-size", "256", "--skip-tokenizer-init", "--enable-metrics")
    with running(folder, tmp_path / "log", *flags, DSA_CPU_RECORD=str(record), **short, **TWO) as server:
        [state] = states(server)
        assert (state["pattern"], state["sharded_layers"], state["sharded_ranks"]) == ("FFFFFF", 6, 2)
        assert state["source"] == "the model's own" and state["proven"]
        assert max(metric(server.get("/metrics"), "sglang:indexcache_layers").values()) == 6

        def ask(number: int) -> Served:
            [(served, _)] = server.generate([prompts[number]], [str(number)], steps=2)
            return served

        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(ask, range(len(prompts))))
        runs = recorder.read(record)
    compared = [(answers[number], [str(number)]) for number in range(0, len(prompts), 10)]
    check_parity(load_reference(folder), Pattern("F" * 6), compared, recorder.indexers(runs), exact=False)
    assert len(shares(short)) > 500 and any(len(set(run.requests)) > 3 for run in runs if run.mode == "EXTEND")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((FLAG, "--enable-hisparse"), f"--enable-hisparse can't be combined with {FLAG}: they were never tried"),
        ((FLAG, "--indexcache-calibrate"), f"{FLAG} and --indexcache-calibrate are given, expected one of them"),
        ((FLAG, "--enable-two-batch-overlap"), f"--enable-two-batch-overlap {NOT_COMBINED}"),
    ],
)
def test_what_it_can_not_be_served_with(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    model = random_models.build("glm-dense", tmp_path / "glm")
    code, lines = launch(command(model, "--skip-tokenizer-init", "--tp-size", "2", *flags)[len(LAUNCHER) :])
    assert code == 2 and len(lines) == 1 and message in lines[0], lines


def test_other_models(tmp_path: Path) -> None:
    model = random_models.build("llama", tmp_path / "llama")
    code, lines = launch(command(model, "--skip-tokenizer-init", "--tp-size", "2", FLAG)[len(LAUNCHER) :])
    assert code == 2 and lines == [f"indexcache: {FLAG} is not served on dense_gqa; expected a DSA model"]


def test_one_rank(tmp_path: Path) -> None:
    model = random_models.build("glm-dense", tmp_path / "glm")
    code, lines = ended(command(model, "--skip-tokenizer-init", FLAG))
    assert code != 0 and set(lines) == {
        f"indexcache: {FLAG} shares out rows over the ranks of attention, and there is one"
    }
