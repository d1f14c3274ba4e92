"""Answers over chosen pages: the same as over everything where the pages are everything, and what the figures mean."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from extras.dense.tests.test_pages import dense_model
from indexcache_dense.selection import Selection
from scripts.bench.search.answers import answer, common, judged, plans, read_prompts, repeated
from sglang_indexcache import Pattern

OPTIONS = argparse.Namespace(seed=0, temperature=0.7, tokens=40, roles=None, pages=5, steps="none,ema:0.9,bounded:1")
ALL = Selection(page_tokens=16, pages=30, recent_pages=2, sink_pages=1, score="compressed_keys")
FEW = Selection(page_tokens=16, pages=5, recent_pages=2, sink_pages=1, score="compressed_keys")


def prompts() -> torch.Tensor:
    return torch.randint(3, 96, (3, 130), generator=torch.Generator().manual_seed(1))


def test_answers_over_all_pages_are_those_of_attention_to_everything() -> None:
    model, ids = dense_model(), prompts()
    own = answer(model, ids, None, OPTIONS).tokens
    assert torch.equal(own, answer(model, ids, Pattern("FFFFFF", ALL), OPTIONS).tokens)
    few = answer(model, ids, Pattern("FFFFFF", FEW), OPTIONS).tokens
    assert not torch.equal(own, few) and own.shape == few.shape == (3, 40)


@torch.inference_mode()
def test_the_judge_is_the_model() -> None:
    model, ids = dense_model(), prompts()
    tokens = answer(model, ids, Pattern("FFFFFF", FEW), OPTIONS).tokens
    whole = torch.cat([ids, tokens], 1)
    logprobs = model(whole).logits[:, len(ids[0]) - 1 : -1].float().log_softmax(2)
    expected = -logprobs.gather(2, tokens[:, :, None])[..., 0].mean(1)
    torch.testing.assert_close(torch.tensor(judged(model, ids, tokens)), expected, rtol=1e-4, atol=1e-4)


def test_prompts_are_what_does_not_count(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(9)), "loss_mask": [0] * n + [1] * (9 - n)} for n in (6, 5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_prompts([tmp_path / "a.jsonl"], torch.device("cpu"))
    assert found.tolist() == [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]


def test_figures() -> None:
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert common([1, 2, 3], [1, 2, 4]) == 2
    assert common([1, 2], [1, 2]) == 2
    assert list(plans(OPTIONS, 6)) == ["everything", "none", "ema:0.9", "bounded:1"]
