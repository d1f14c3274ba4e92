"""Layers that select for blocks of prompt queries: what SGLang selects is what the definition does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from sglang_indexcache.families.dsa import placing
from sglang_indexcache.families.dsa.blocks import blocks_of
from tests.live import models
from tests.live.inprocess import Served, _ended, call, generate, launch, load, load_runner
from tests.live.reference import check_selections, load_reference
from tests.live.server import running
from tests.live.test_server import states
from tests.patterns import write_pattern

pytestmark = pytest.mark.sglang

STEPS = 4
CHUNK = 256
PATTERNS = {
    "glm-moe": ("FSFFSF+2q4+3q4", "FFSFSS+0q16+1q16"),
    "deepseek-v3.2": ("FSFFSF+0q8+5q8",),
}


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(2, models.VOCAB) for _ in range(length)] for length in lengths]


def in_blocks(passes: Sequence[tuple[int, int]], length: int, pattern: Pattern, topk: int) -> Tensor:
    """Which queries of a sequence select in blocks, `[1, length]`; `passes` have a prefix and a length each."""
    [queries] = {indexer.queries for indexer in pattern.indexers if indexer.queries}
    shared = torch.zeros(1, length, dtype=torch.bool)
    for prefix, computed in passes:
        shared[0, prefix : prefix + computed] = False
        for begin in blocks_of([prefix], [computed], queries, topk).begins:
            shared[0, begin : begin + queries] = True
    return shared


def check_blocks(
    model: Any,
    pattern: Pattern,
    served: Served,
    requests: Sequence[str],
    passes: Sequence[tuple[int, int]],
    runs: Sequence[recorder.Run],
) -> int:
    """As `check_selections`; returns how many queries were in blocks."""
    shared = in_blocks(passes, len(served.ids) - 1, pattern, model.config.index_topk)
    check_selections(model, pattern, served, requests, runs, shared)
    return int(shared.sum())


@pytest.mark.parametrize(("kind", "letters"), [(kind, text) for kind, texts in PATTERNS.items() for text in texts])
def test_served_selections_are_the_definitions(kind: str, letters: str, tmp_path: Path) -> None:
    """A batch of mixed lengths, one of them with nothing to share."""
    folder, pattern, record = models.build(kind, tmp_path / kind), Pattern.parse(letters), tmp_path / "record"
    record.mkdir()
    file = write_pattern(pattern, folder, tmp_path / "pattern.yaml")
    prompts = random_prompts(333, 250, 90)
    answers, model = generate(folder, file, prompts, STEPS, record), load_reference(folder)
    runs = recorder.read(record)
    shared = [
        check_blocks(model, pattern, served, [str(index)], [(0, served.prompt)], runs)
        for index, served in enumerate(answers)
    ]
    assert shared[0] > 150 and shared[1] > 90 and shared[2] == 0


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """One layer in blocks more or fewer is seen."""
    folder, record = models.build("glm-dense", tmp_path / "glm"), tmp_path / "record"
    record.mkdir()
    file = write_pattern(Pattern.parse("FSFFSF+2q4+3q4"), folder, tmp_path / "pattern.yaml")
    [served] = generate(folder, file, random_prompts(333), STEPS, record)
    with pytest.raises(AssertionError):
        other = Pattern.parse("FSFFSF+2q4+5q4")
        check_blocks(load_reference(folder), other, served, ["0"], [(0, 333)], recorder.read(record))


@pytest.mark.slow
def test_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, chunks, a batch and a prefix hit; status and check say what was proven."""
    folder, pattern, record = models.build("glm-moe", tmp_path / "glm"), Pattern.parse("FSFFSF+2q4+3q4"), tmp_path / "r"
    record.mkdir()
    file, model = write_pattern(pattern, folder, tmp_path / "pattern.yaml"), load_reference(folder)
    changes = {"DSA_CPU_RECORD": str(record), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    flags = ("--chunked-prefill-size", str(CHUNK), "--tp-size", "2", "--skip-tokenizer-init")
    with running(folder, tmp_path / "log", "--indexcache-pattern", file, *flags, **changes) as server:
        [state] = states(server)
        assert state["pattern"] == pattern.letters and state["fingerprint"] == pattern.fingerprint
        assert state["proven_ranks"] == 2
        assert check_main([file, "--server", server.url]) == 0
        other = write_pattern(Pattern("FSFFSF"), folder, tmp_path / "other.yaml")
        assert check_main([other, "--server", server.url]) == 1
        assert "serves fingerprint" in capsys.readouterr().out

        long, prefix = random_prompts(600)[0], 384
        [(first, _)] = server.generate([long], ["first"], steps=STEPS)
        branch = long[:prefix] + random_prompts(250)[0]
        [(second, cached)] = server.generate([branch], ["second"], steps=STEPS, inputs=False)
        assert cached == prefix
        runs = recorder.read(record)
        computed = passes(runs, "first")
        assert len(computed) == 3 and all(length <= CHUNK for _, length in computed)
        assert check_blocks(model, pattern, first, ["first"], computed, runs) > 200
        again = passes(runs, "second")
        assert again[0][0] == prefix
        both = [*computed[:2], *again]
        assert check_blocks(model, pattern, second, ["first", "second"], both, runs) > 200


def passes(runs: Sequence[recorder.Run], request: str) -> list[tuple[int, int]]:
    """Prefix and length of each prefill of a request."""
    layer = min(run.layer for run in runs)
    found = set()
    for run in recorder.indexers(runs):
        rows = [at for rid, at in zip(run.requests, run.positions, strict=True) if rid == request]
        if run.layer == layer and run.mode == "EXTEND" and rows:
            found.add((rows[0], len(rows)))
    return sorted(found)


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        (
            "--enable-hisparse",
            "--enable-hisparse can't be combined with 2q4: indexers that score less than everything were never tried"
            " with it",
        ),
        ("--enable-lmcache", "--enable-lmcache can't be combined with a pattern: its cache keys don't carry"),
    ],
)
def test_what_does_not_go_together(flag: str, line: str, tmp_path: Path) -> None:
    """Also where all layers are F."""
    folder = models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(Pattern.parse("FFFFFF+2q4"), folder, tmp_path / "pattern.yaml")
    code, lines = launch(["--indexcache-pattern", file, "--model-path", str(folder), "--device", "cpu", flag])
    assert code == 2 and len(lines) == 1 and lines[0].startswith("indexcache: " + line)


def without_blocks(folder: Path) -> tuple[int, list[str]]:
    """Load a model where nothing makes indexers select in blocks."""
    placing.install = lambda *_: None  # type: ignore[assignment]
    return _ended(lambda: load_runner(folder))


def test_what_was_not_made_to_select_in_blocks_is_not_served(tmp_path: Path) -> None:
    folder = models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(Pattern.parse("FFFFFF+2q4"), folder, tmp_path / "pattern.yaml")
    code, lines = call(without_blocks, folder, SGLANG_INDEXCACHE_PATTERN=file)
    assert code == 2
    assert lines == [
        "indexcache: the indexer of letter 2 would run as one that scores everything, the pattern says 2q4"
    ]


def test_a_block_larger_than_the_selection(tmp_path: Path) -> None:
    folder = models.build("glm-dense", tmp_path / "glm")
    topk = json.loads((folder / "config.json").read_text())["index_topk"]
    file = write_pattern(Pattern.parse("FFFFFF+2q64"), folder, tmp_path / "pattern.yaml")
    code, lines = load(folder, SGLANG_INDEXCACHE_PATTERN=file)
    assert code == 2
    assert lines == [f"indexcache: letter 2 selects for 64 queries at a time, expected at most index_topk ({topk})"]
