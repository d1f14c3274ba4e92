"""Prompts that attend over unions in SGLang on a CPU: answers are those without."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from extras.dense.tests.live.selecting import random_prompts
from indexcache_lab.kernels.union_attention.serving import UnionAttention
from scripts.tools import inprocess, random_models
from scripts.tools.inprocess import Served, call
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern

pytestmark = pytest.mark.sglang

STEPS = 2


def served(model: Path, prompts: Sequence[Sequence[int]]) -> tuple[list[Served], list[Mapping[str, int]]]:
    """Prefill all prompts as one batch; return answers, and what went by unions."""
    made: list[UnionAttention] = []
    initialise = UnionAttention.__init__

    def noted(self: UnionAttention, *given: object) -> None:
        initialise(self, *given)  # type: ignore[arg-type]
        made.append(self)

    UnionAttention.__init__ = noted  # type: ignore[method-assign]
    answers = inprocess._generate(model, prompts, STEPS)
    return answers, [dict(exact.passes) for exact in made]


@pytest.mark.parametrize(("letters", "united"), [("FSSFSF", 3), ("FSSFSF+3q8", 2)])
def test_answers_are_those_without(letters: str, united: int, tmp_path: Path) -> None:
    """A batch of mixed lengths; beside blocks, too."""
    folder, pattern, record = (
        random_models.build("glm-moe", tmp_path / "glm"),
        Pattern.parse(letters),
        tmp_path / "record",
    )
    record.mkdir()
    common = {
        "DSA_CPU_RECORD": str(record),
        "TEST_ARGUMENTS": json.dumps({}),
        "SGLANG_INDEXCACHE_PATTERN": write_pattern(pattern, folder, tmp_path / "pattern.yaml"),
    }
    prompts = random_prompts(701, 90, 333)  # 1,124 rows
    plain, nobody = call(served, folder, prompts, **common)
    ours, passes = call(served, folder, prompts, **common, SGLANG_INDEXCACHE_UNION_ATTENTION="1")
    assert nobody == [] and passes == [{"unions": united, "sglang": 0}]
    for one, other in zip(plain, ours, strict=True):
        assert other.ids == one.ids
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)
