"""Answers of our server beside those of SGLang's switch: which are the same, and whether the switch did anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.serving import combinations
from scripts.bench.serving.combinations import Bench, Distance, Served

ALL_FULL = [Served((1, 2, 3), (-0.1, -0.2, -0.3), 0), Served((4,), (-0.1,), 0)]
SHARED = [Served((1, 7, 3), (-0.1, -0.4, -0.3), 0), Served((4,), (-0.2,), 0)]
NOISE = [Served((1, 7, 3), (-0.1001, -0.4, -0.3), 0), Served((4,), (-0.2,), 0)]
STATE = [{"proven": True, "pattern": "FSSFSS"}]


def test_distances_end_where_tokens_differ() -> None:
    assert Distance.of(SHARED, SHARED) == Distance(0, 0, 0)
    found = Distance.of(ALL_FULL, SHARED)
    assert found.prompts == 1 and (found.largest, found.mean) == pytest.approx((0.1, 0.1 / 3))
    assert Distance.of(SHARED, NOISE) < Distance.of(SHARED, ALL_FULL)


@pytest.mark.parametrize(
    ("answers", "fine", "line"),
    [
        ({"ours": SHARED, "sglang": SHARED, "full": ALL_FULL}, True, "runs the pattern"),
        ({"ours": NOISE, "sglang": SHARED, "full": ALL_FULL}, True, "runs the pattern"),
        ({"ours": SHARED, "sglang": ALL_FULL, "full": ALL_FULL}, False, "IGNORED: answers like all F"),
        ({"ours": ALL_FULL, "sglang": ALL_FULL, "full": ALL_FULL}, False, "IGNORED: answers like all F"),
    ],
    ids=["equal", "noise", "ignored", "all alike"],
)
def test_a_switch_that_is_ignored_fails(
    answers: dict[str, list[Served]],
    fine: bool,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where our server, which has proven the pattern, answers as without it: nothing was shown."""
    config = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps({**config, "index_topk": 16, "index_n_heads": 32}))
    switches = []

    def served(self: Bench, cell: Any, which: str) -> tuple[list[Served], list[Any], list[str]]:
        switches.append(self.switch)
        return answers[which], STATE if which == "ours" else [], []

    monkeypatch.setattr(Bench, "_answers", served)
    arguments = ["--model", str(tmp_path), "--pattern", "FSSFSS", "--logs", str(tmp_path), "cell="]
    monkeypatch.setattr(sys, "argv", ["combinations", *arguments])
    assert combinations.main() == (0 if fine else 1)
    assert line in capsys.readouterr().out
    types = ["full", "shared", "shared"] * 2
    expected = {"index_topk_pattern": "FSSFSS", "indexer_types": types, "index_topk_freq": 1}
    assert switches == [expected] * 3
