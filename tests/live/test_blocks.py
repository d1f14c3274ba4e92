"""Layers that select for blocks of prompt queries: what SGLang selects is what the definition does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from extras.dense.tests.live.selecting import in_blocks, passes, random_prompts, serve_a_branch
from scripts.tools import random_models
from scripts.tools.inprocess import Served, call, generate, load_runner
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.blocks import patch_indexers
from sglang_indexcache.io.messages import NOT_COMBINED, WOULD_RUN
from tests.live.ending import _ended, launch, load
from tests.live.reference import check_selections, load_reference

pytestmark = pytest.mark.sglang

STEPS = 4
PATTERNS = {
    "glm-moe": ("FSFFSF+2q4+3q4", "FFSFSS+0q16+1q16"),
    "deepseek-v3.2": ("FSFFSF+0q8+5q8",),
    "hy-v4": ("FFSFFS+0q4+3q4",),
}


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
    folder, pattern, record = random_models.build(kind, tmp_path / kind), Pattern.parse(letters), tmp_path / "record"
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
    folder, record = random_models.build("glm-dense", tmp_path / "glm"), tmp_path / "record"
    record.mkdir()
    file = write_pattern(Pattern.parse("FSFFSF+2q4+3q4"), folder, tmp_path / "pattern.yaml")
    [served] = generate(folder, file, random_prompts(333), STEPS, record)
    with pytest.raises(AssertionError):
        other = Pattern.parse("FSFFSF+2q4+5q4")
        check_blocks(load_reference(folder), other, served, ["0"], [(0, 333)], recorder.read(record))


# Each rank notes for how many blocks, and how many other queries, it attends.
SCRIPT = """
import os
from sglang_indexcache.families.dsa.blocks import grouped

whole = grouped.grouped_attention

def attend(q, *given, queries, **named):
    with open(os.environ["TEST_GROUPED"], "a") as file:
        file.write(f"{len(q) // queries} {queries}\\n")
    return whole(q, *given, queries=queries, **named)

grouped.grouped_attention = attend
"""


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ((), 3),
        pytest.param(("--indexcache-no-grouping",), None, marks=pytest.mark.slow),
        pytest.param(("--dsa-prefill-backend", "tilelang"), None, marks=pytest.mark.slow),
    ],
    ids=["together", "alone", "other-kernel"],
)
def test_a_server(
    flags: tuple[str, ...], layers: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Queries of blocks are attended from together in layers 2, 3 and 4 (S above F), on both ranks."""
    folder, pattern = random_models.build("glm-moe", tmp_path / "glm"), Pattern.parse("FSFFSF+2q4+3q4")
    (tmp_path / "script.py").write_text(SCRIPT)
    noted = tmp_path / "grouped"
    changes = {"TEST_SABOTAGE": str(tmp_path / "script.py"), "TEST_GROUPED": str(noted)}
    first, second, runs = serve_a_branch(folder, pattern, tmp_path, STEPS, *flags, grouped=layers, **changes)
    assert "serves fingerprint" in capsys.readouterr().out
    lines = noted.read_text().splitlines() if noted.exists() else []
    assert len(lines) == (2 * 3 * 3 if layers else 0)  # ranks, layers, passes with blocks
    assert set(lines) <= {f"{count} 4" for count in range(1, 64)}
    model, computed, again = load_reference(folder), passes(runs, "first"), passes(runs, "second")
    assert check_blocks(model, pattern, first, ["first"], computed, runs) > 200
    assert check_blocks(model, pattern, second, ["first", "second"], [*computed[:2], *again], runs) > 200


@pytest.mark.slow
def test_a_server_of_hy_v4(tmp_path: Path) -> None:
    """Attention sinks belong to each query's softmax: its blocks are attended from one by one, also where asked."""
    folder, pattern = random_models.build("hy-v4", tmp_path / "hy"), Pattern.parse("FFSFFS+1q4+3q4")
    first, second, runs = serve_a_branch(folder, pattern, tmp_path, STEPS, grouped=None)
    model, computed, again = load_reference(folder), passes(runs, "first"), passes(runs, "second")
    assert check_blocks(model, pattern, first, ["first"], computed, runs) > 200
    assert check_blocks(model, pattern, second, ["first", "second"], [*computed[:2], *again], runs) > 200


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        (
            "--enable-hisparse",
            "--enable-hisparse can't be combined with 2q4: layers that select for blocks of queries were never tried"
            " with it",
        ),
        ("--enable-lmcache", f"--enable-lmcache {NOT_COMBINED}: its cache keys don't carry"),
    ],
)
def test_what_does_not_go_together(flag: str, line: str, tmp_path: Path) -> None:
    """Also where all layers are F."""
    folder = random_models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(Pattern.parse("FFFFFF+2q4"), folder, tmp_path / "pattern.yaml")
    code, lines = launch(["--indexcache-pattern", file, "--model-path", str(folder), "--device", "cpu", flag])
    assert code == 2 and len(lines) == 1 and lines[0].startswith("indexcache: " + line)


def without_blocks(folder: Path) -> tuple[int, list[str]]:
    """Load a model where nothing makes indexers select in blocks."""
    patch_indexers.install = lambda *_: None  # type: ignore[assignment]
    return _ended(lambda: load_runner(folder))


def test_what_was_not_made_to_select_in_blocks_is_not_served(tmp_path: Path) -> None:
    folder = random_models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(Pattern.parse("FFFFFF+2q4"), folder, tmp_path / "pattern.yaml")
    code, lines = call(without_blocks, folder, SGLANG_INDEXCACHE_PATTERN=file)
    assert code == 2
    assert lines == [f"indexcache: the indexer of layer 2 {WOULD_RUN} one that scores everything, the pattern says 2q4"]


def test_a_block_larger_than_the_selection(tmp_path: Path) -> None:
    folder = random_models.build("glm-dense", tmp_path / "glm")
    topk = json.loads((folder / "config.json").read_text())["index_topk"]
    file = write_pattern(Pattern.parse("FFFFFF+2q64"), folder, tmp_path / "pattern.yaml")
    code, lines = load(folder, SGLANG_INDEXCACHE_PATTERN=file)
    assert code == 2
    assert lines == [f"indexcache: layer 2 selects for 64 queries at a time, expected at most index_topk ({topk})"]
