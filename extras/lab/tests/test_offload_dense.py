"""indexcache-offload of dense models: pages that are selected, their bytes, and plans within limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from extras.lab.tests.offloading import STEPS, offload
from indexcache_dense.hf.engine import PageEngine
from indexcache_dense.hf.pages import apply_page_roles
from indexcache_dense.reuse import ReusePolicy
from indexcache_lab.kernels import BlockBuffer, swap_blocks
from indexcache_lab.offload.advice import CacheBytes, selecting_layers
from indexcache_lab.offload.counting import count_misses
from indexcache_lab.offload.lru_buffer import page_misses
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.evaluation.identity import today
from indexcache_search.evaluation.journal import Journal
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe
from sglang_indexcache.io.errors import IndexCacheError
from tests.conftest import (
    PAGES,
    random_tokens,
    tiny_dense_config,
    tiny_model,
)

FEW = "page_tokens=4,pages=3,recent_pages=1"


def dense_engine() -> PageEngine:
    config = tiny_dense_config()
    return PageEngine(tiny_model(config), describe(config, "tiny"))


def test_pages_that_decoding_chooses_are_numbered() -> None:
    """Pages of each step alone come in their order, with empty places behind them."""
    engine, data = dense_engine(), random_tokens(2, 40)
    selection = replace(PAGES, pages=3, recent_pages=1, steps=ReusePolicy.parse("ema:0.9"))
    prompt = np.broadcast_to(np.arange(40) < 40 - STEPS, (2, 40))
    given, pattern = replace(data, prompt=prompt), Pattern("DFSDSF", selection)
    found = engine.selections(pattern, given, 1, STEPS)
    assert {layer: rows.shape for layer, rows in found.items() if layer in selecting_layers(pattern)} == dict.fromkeys(
        (1, 3, 5), (1, STEPS, 3)
    )
    seen: dict[int, Any] = {}
    tokens = torch.from_numpy(data.tokens[[1]].astype(np.int64))
    with apply_page_roles(engine.torch_model, pattern, torch.from_numpy(prompt[[1]].copy()), observe=seen.__setitem__):
        engine.torch_model(tokens)
    for layer in selecting_layers(pattern):
        for step, row in enumerate(found[layer][0]):
            at = 40 - STEPS + step
            expected = seen[layer][0, at, : at // 4 + 1].nonzero()[:, 0].tolist()
            assert row.tolist() == expected and len(expected) == 3


def test_key_heads_miss_pages_of_their_own(tmp_path: Path) -> None:
    """Each has a buffer; what the simulator counts is what the swap kernel copies behind the first step."""
    engine, data = dense_engine(), random_tokens(2, 40)
    selection = replace(PAGES, pages=3, recent_pages=1, heads="key")
    given = replace(data, prompt=np.broadcast_to(np.arange(40) < 40 - STEPS, (2, 40)))
    pattern, newest = Pattern("DFSDSF", selection), [at // 4 for at in range(40 - STEPS, 40)]
    with Journal(tmp_path, {"a": 1}, today()) as journal:
        misses = count_misses(engine, given, journal, pattern, sizes=(3, 5), steps=STEPS)
    for row in range(2):
        selected = engine.selections(pattern, given, row, STEPS)
        for number, layer in enumerate(selecting_layers(pattern)):
            rows = selected[layer]
            assert rows.shape == (2, STEPS, 3) and (rows[0] != rows[1]).any()
            for size, found in zip((3, 5), misses[row, :, number], strict=True):
                assert found == sum(page_misses(own, size, newest) for own in rows) > 0
                assert found == sum(copied(own, size, newest) for own in rows)


def copied(steps: Any, size: int, newest: list[int]) -> int:
    """Blocks that `swap_blocks` marks behind the first step, in a buffer that begins with the prompt's last pages."""
    buffer, before, count = BlockBuffer.empty(1, size), newest[0], 0
    first = torch.arange(max(0, before + 1 - size), before + 1, dtype=torch.int32)[None]
    none = torch.tensor([-1], dtype=torch.int32)
    swap_blocks(first, none, buffer)
    for number, (chosen, page) in enumerate(zip(steps, newest, strict=True)):
        new_block = torch.tensor([page], dtype=torch.int32) if page != before else none
        needs_copy = swap_blocks(torch.from_numpy(chosen)[None], new_block, buffer)[1]
        count, before = count + (int(needs_copy.sum()) if number else 0), page
    return count


def test_pages_are_counted_by_hand() -> None:
    """A page is brought when it is chosen and not there; the newest one begins on the device."""
    steps = np.array([[0, 2, 5], [0, 3, 5], [0, 2, 6], [0, 5, 6], [2, 3, 6]], np.int32)
    newest = [5, 5, 6, 6, 6]
    assert page_misses(steps, 3, newest) == 1 + 1 + 1 + 2
    assert page_misses(steps, 4, newest) == 1 + 0 + 0 + 1  # 2 was still there, then 5, then 2 again
    assert page_misses(steps, 8, newest) == 0  # all of the prompt was still there
    assert page_misses(steps, 10**12, newest) == 0
    with pytest.raises(IndexCacheError, match="a buffer of 2 items can't hold 3"):
        page_misses(steps, 2, newest)


def test_bytes_of_dense_models() -> None:
    """SmolLM2: 3 key heads of 64 dimensions."""
    config = SimpleNamespace(num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    size = CacheBytes.of_dense(config, "bfloat16", replace(PAGES, page_tokens=64, score="compressed_keys"))
    assert size == CacheBytes(kv=768, index=24, item=64, miss=64 * 768, piece=64 * 128, beside=0)
    rounded = CacheBytes.of_dense(config, "bfloat16", replace(PAGES, score="rounded_keys"))
    assert rounded.index == 3 * (64 // 2 + 4)
    by_head = CacheBytes.of_dense(config, "bfloat16", replace(PAGES, page_tokens=64, heads="key"))
    assert by_head.miss == 64 * 256 == 2 * by_head.piece
    pattern = Pattern("DDFSS", PAGES)
    assert size.on_host(pattern, 1000) == 3 * 1000 * 768
    assert size.on_device(pattern, 128, 1000) == (2 * 1000 + 3 * 128) * 768 + 1000 * 24
    assert size.on_device(pattern, 1024, 1000) == 5 * 1000 * 768 + 1000 * 24
    assert CacheBytes.of_dense(config, "fp8_e4m3", PAGES) == CacheBytes(
        kv=384, index=0, item=4, miss=4 * 384, piece=4 * 64, beside=0
    )


def test_plans_of_a_dense_model(
    dense_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", dense_folder, "--evaluation", token_file, "--seq-len", 32, "--num-sequences", 3,
               "--decode-steps", 8, "--pattern", "FFFFFF", "--pattern", "mine=DFSSDS", "--buffers", "1,2,3",
               "--selection", f"{FEW},steps=none/refresh:8", "--server", "bandwidth=0.001,step_ms=6",
               "--output", tmp_path / "out", "--device", "cpu"]  # fmt: skip
    done = offload(*options)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "offload.json").read_text())
    names = [plan["name"] for plan in result["plans"]]
    assert names == ["baseline", "letters, none", "letters, refresh:8", "mine, none", "mine, refresh:8"]
    baseline, *plans = result["plans"]
    assert baseline["buffers"] == [] and baseline["kl"]["mean"] == 0 and baseline["host_bytes"] == 0
    for plan in plans:
        assert plan["kl"]["mean"] > 0 and plan["item"] == 4 and plan["selected"] == 12
        assert [buffer["size"] for buffer in plan["buffers"]] == [12, 24, 36]
        missed = [buffer["exposed"]["mean"] + buffer["hidden"]["mean"] for buffer in plan["buffers"]]
        assert missed == sorted(missed, reverse=True) and missed[2] == 0  # room for all
        assert {buffer["hisparse_config"] for buffer in plan["buffers"]} == {None}
    every, held, mine = plans[0]["buffers"][0], plans[1]["buffers"][0], plans[2]["buffers"][0]
    assert every["hidden"]["mean"] == 0 and held["exposed"]["mean"] < every["exposed"]["mean"]
    assert mine["hidden"]["mean"] > 0 and set(mine["by_layer"]) == {"1", "4"}
    assert mine["hidden"]["mean"] == pytest.approx(2 * mine["by_layer"]["1"] + mine["by_layer"]["4"])
    assert mine["exposed"]["mean"] == pytest.approx(mine["by_layer"]["1"])
    page = (tmp_path / "out" / "offload.html").read_text()
    assert "4|3|1|0|token_max|refresh:8|" in page and "hisparse" not in page.partition("<h2>")[2]
    monkeypatch.setattr(TransformersEngine, "selections", lambda *_: 1 / 0)
    monkeypatch.setattr(TransformersEngine, "evaluate", lambda *_, **__: 1 / 0)
    again = offload(*options)
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "out" / "offload.json").read_text()) == result


@pytest.mark.usefixtures("no_pictures")
def test_pages_of_key_heads_are_a_part_of_a_page(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """Two key heads: a missing page of one is half the bytes, and the plan that is written says so."""
    found = {}
    for heads in ("joint", "key"):
        options = ["--model", dense_folder, "--evaluation", token_file, "--seq-len", 32, "--num-sequences", 3,
                   "--decode-steps", 8, "--pattern", "FFFFFF", "--buffers", "1,3", "--device", "cpu",
                   "--max-transfer", 1, "--selection", f"{FEW},heads={heads}",
                   "--output", tmp_path / heads]  # fmt: skip
        done = offload(*options)
        assert done.exit_code == 0, done.output
        [_, plan] = json.loads((tmp_path / heads / "offload.json").read_text())["plans"]
        found[heads] = plan["buffers"][0]["bytes_a_step"] / plan["buffers"][0]["exposed"]["mean"]
        selection = PatternFile.load(tmp_path / heads / "pattern.yaml").as_pattern().selection
        assert selection is not None and selection.heads == heads
    assert found["joint"] == pytest.approx(2 * found["key"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_the_best_plan_within_limits(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """Least KL first; then the smallest buffer that brings no more than allowed."""
    options = ["--model", dense_folder, "--evaluation", token_file, "--seq-len", 32, "--num-sequences", 3,
               "--decode-steps", 8, "--pattern", "FFFFFF", "--pattern", "DFSSDS", "--buffers", "1,2,3",
               "--selection", f"{FEW},steps=none/refresh:8", "--device", "cpu",
               "--output", tmp_path / "out"]  # fmt: skip
    assert offload(*options).exit_code == 0
    plans = json.loads((tmp_path / "out" / "offload.json").read_text())["plans"]
    assert not (tmp_path / "out" / "pattern.yaml").exists()
    pairs = [(plan, buffer) for plan in plans for buffer in plan["buffers"]]
    pairs.sort(key=lambda pair: (pair[0]["kl"]["mean"], pair[1]["device_bytes"]))
    for limit in sorted(buffer["bytes_a_step"] for _, buffer in pairs):
        done = offload(*options, "--max-transfer", limit / 1e6 * (1 + 1e-12))
        assert done.exit_code == 0, done.output
        choice = json.loads((tmp_path / "out" / "offload.json").read_text())["choice"]
        plan, buffer = next(pair for pair in pairs if pair[1]["bytes_a_step"] <= limit)
        assert choice == {"name": plan["name"], "buffer": buffer}
        file = PatternFile.load(tmp_path / "out" / "pattern.yaml")
        assert file.pattern == plan["pattern"] and file.selection is not None
        assert file.selection.buffer_pages == buffer["size"] // 4
        assert str(replace(file.selection, buffer_pages=None)) == plan["selection"]
    small = min(buffer["device_bytes"] for _, buffer in pairs)
    done = offload(*options, "--max-device-gb", small / 1e9)
    assert done.exit_code == 0 and "least KL within the limits: FFFFFF" in done.output
    assert "pattern.yaml" in done.output and "Least KL within" in (tmp_path / "out" / "offload.html").read_text()
    none = offload(*options, "--max-device-gb", small / 1.001e9)
    assert none.exit_code == 1 and "nothing is within the limits; the least that a step brings is" in none.output
    assert "removed " in none.output and not (tmp_path / "out" / "pattern.yaml").exists()
    wrong = offload(*options, "--max-transfer", "nan")
    assert wrong.exit_code == 2 and "found nan, expected 0 to 1e+09" in wrong.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "pattern is of F and S without a selection, the model is dense"),
        (["--selection", FEW, "--decode-steps", 30], "--decode-steps is 30, expected at most 20: up to 12 tokens"),
        (["--selection", f"{FEW},steps=ema"], "steps are 'ema', expected none, ema:BETA"),
        (["--selection", f"{FEW},score=best"], "score: found 'best', expected one of token_max, compressed_keys"),
        (
            ["--selection", FEW, "--endpoint", "http://127.0.0.1:9"],
            "--endpoint does not run LlamaForCausalLM; expected",
        ),
    ],
)
def test_bad_plans_of_dense_models(
    options: list[Any], expected: str, dense_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    given = ["--model", dense_folder, "--evaluation", token_file, "--seq-len", 32, "--pattern", "FSSSSS"]
    done = offload(*given, "--output", tmp_path, *options)
    assert done.exit_code == 2, done.output
    assert expected in " ".join(done.output.split()), done.output


def test_the_file_is_that_of_the_chosen_pattern(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """Two patterns that are spelt out are two lines; a name that is taken, or stands for two, is refused."""
    options = ["--model", dense_folder, "--evaluation", token_file, "--seq-len", 32, "--num-sequences", 2,
               "--decode-steps", 8, "--selection", FEW, "--buffers", "1,3", "--device", "cpu",
               "--output", tmp_path / "out"]  # fmt: skip
    patterns = ("DFSSSS", "DFFFFF", "DFSFSS")
    named = [word for pattern in patterns for word in ("--pattern", pattern)]
    done = offload(*options, *named, "--max-transfer", 1000)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out" / "offload.json").read_text())
    assert [plan["name"] for plan in found["plans"]] == ["baseline", *patterns]
    best = min(found["plans"][1:], key=lambda plan: plan["kl"]["mean"])
    assert found["choice"]["name"] == best["name"] == best["pattern"]
    assert PatternFile.load(tmp_path / "out" / "pattern.yaml").pattern == best["pattern"]
    for given, message in (
        (["baseline=DFSSSS"], "the name baseline is taken"),
        (["DFSSSS", "DFSSSS"], "DFSSSS stands there twice"),
        (["a=DFSSSS", "a=DFFFFF"], "a stands there twice"),
    ):
        done = offload(*options, *(word for pattern in given for word in ("--pattern", pattern)))
        assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
    done = offload(*options, "--pattern", tmp_path / "out" / "pattern.yaml")
    assert done.exit_code == 2 and "what is read and what is written overlap" in " ".join(done.output.split())
