"""Who shares a batch does not change what a query selects, but for calls that rounding decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa import blocks
from tests.live import inprocess, models
from tests.live.inprocess import call, load_runner
from tests.live.neighbours import Comparison, compare
from tests.patterns import write_pattern

pytestmark = pytest.mark.sglang

LETTERS = "FFSFSFS+1q16+3q16+5q4"
TIE = 2e-5  # of a row's highest score; between batches, scores differ by 3e-6
LOGITS = 1e-4  # logits by 4e-6


def draw(seed: int, count: int) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Prompts of unlike lengths in any order, a third of them in two chunks."""
    rng = random.Random(seed)
    lengths = [rng.randint(*rng.choice([(5, 140), (150, 260)])) for _ in range(count - 1)] + [rng.randint(180, 260)]
    prompts = {
        f"{seed}.{number}": [rng.randrange(2, models.VOCAB) for _ in range(length)]
        for number, length in enumerate(lengths)
    }
    return prompts, {name: rng.randrange(1, len(ids)) for name, ids in prompts.items() if rng.random() < 1 / 3}


def leading_across_requests() -> None:
    """Blocks are counted from the batch's first row: alone they are the same."""
    whole = blocks.blocks_of

    def blocks_of(prefixes: Sequence[int], lengths: Sequence[int], queries: int, topk: int) -> blocks.Blocks:
        found = whole(prefixes, lengths, queries, topk)
        rows = tuple(-(-row // queries) * queries for row in found.rows)
        moved = zip(found.begins, rows, found.rows, strict=True)
        return replace(found, rows=rows, begins=tuple(begin + row - was for begin, row, was in moved))

    blocks.blocks_of = blocks_of


def led_a_little_by_the_first() -> None:
    """A thousandth of the batch's first query is in every leader."""
    whole = blocks._take
    blocks._take = lambda values, rows: whole(values, rows) + values[:1] / 1000


def compared(model: Path, seeds: Sequence[int], count: int, steps: int) -> list[Comparison]:
    inprocess.ARGUMENTS |= {"max_running_requests": 16}
    runner = load_runner(model)
    return [compare(runner, *draw(seed, count), steps) for seed in seeds]


def compared_when(broken: Callable[[], None], model: Path) -> Comparison:
    runner = load_runner(model)
    broken()
    prompts, _ = draw(0, 3)
    return compare(runner, prompts, {}, 1)


def check(found: Comparison) -> None:
    """Nothing differs by more than rounding explains."""
    assert [difference for difference in found.differing if difference.gap > TIE] == []
    assert found.drift <= TIE
    assert max([0.0, *found.experts, *found.flipped]) <= LOGITS


def files(folder: Path) -> tuple[Path, str]:
    """A model of seven layers, and a pattern for it."""
    model = models.build("glm-moe", folder / "glm", num_hidden_layers=len(Pattern.parse(LETTERS)))
    return model, write_pattern(Pattern.parse(LETTERS), model, folder / "pattern.yaml")


@pytest.mark.parametrize("seeds", [(0,), pytest.param(tuple(range(1, 6)), marks=pytest.mark.slow)], ids=["12", "60"])
def test_prompts_alone_and_in_a_batch(seeds: tuple[int, ...], tmp_path: Path) -> None:
    model, pattern = files(tmp_path)
    for found in call(compared, model, seeds, 12, 5, SGLANG_INDEXCACHE_PATTERN=pattern):
        check(found)
        assert found.selections > 4000 and found.in_blocks > 500


@pytest.mark.parametrize("broken", [leading_across_requests, led_a_little_by_the_first])
def test_the_comparison_can_fail(broken: Callable[[], None], tmp_path: Path) -> None:
    model, pattern = files(tmp_path)
    found = call(compared_when, broken, model, SGLANG_INDEXCACHE_PATTERN=pattern)
    assert found.in_blocks > 50
    with pytest.raises(AssertionError):
        check(found)
