"""indexcache-offload: what decode steps select, what they bring to the device, and what that is taken to cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from indexcache_dense.hf.engine import PageEngine
from indexcache_dense.hf.pages import apply_page_roles
from indexcache_dense.reuse import ReusePolicy
from indexcache_lab.kernels import BlockBuffer, swap_blocks
from indexcache_lab.offload import bandwidth, cli
from indexcache_lab.offload.advice import PAGE, CacheBytes, hisparse_config, selecting_layers, stall_ms
from indexcache_lab.offload.counting import count_misses
from indexcache_lab.offload.lru_buffer import page_misses
from indexcache_lab.offload.server import Server
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.identity import today
from indexcache_search.evaluation.journal import Journal
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.messages import OTHER_LENGTH
from tests.conftest import (
    LAYERS,
    PAGES,
    TOPK,
    random_tokens,
    tiny_config,
    tiny_dense_config,
    tiny_engine,
    tiny_model,
    tiny_v4_config,
)

STEPS = 12


def offload(*options: object) -> Any:
    return CliRunner().invoke(cli.app, [str(option) for option in options])


def test_what_is_selected_is_what_decoding_selects(config: dict[str, Any]) -> None:
    """Each step alone, on the tokens before it: the same tokens, by the layers that choose."""
    engine, data, pattern = tiny_engine(config), random_tokens(2, 30), Pattern("FSFFSS")
    selected = engine.selections(pattern, data, 1, STEPS)
    assert sorted(selected) == [0, 2, 3] and {rows.shape for rows in selected.values()} == {(1, STEPS, TOPK)}
    for step in range(STEPS):
        shorter = type(data)(data.tokens[:, : 19 + step], data.scored[:, : 19 + step], data.source_of, data.sources)
        alone = engine.selections(pattern, shorter, 1, 1)
        for layer, rows in selected.items():
            assert set(rows[0, step].tolist()) == set(alone[layer][0, 0].tolist())


def test_a_buffer_of_exactly_the_selection_misses_what_changes(tmp_path: Path) -> None:
    """And the token before the newest, whose place is taken; a buffer for all misses nothing."""
    engine, data = tiny_engine(tiny_config()), random_tokens(2, 40)
    pattern, sizes = Pattern("FSFSSF"), (TOPK, 40)
    with Journal(tmp_path, {"a": 1}, today()) as journal:
        misses = count_misses(engine, data, journal, pattern, sizes=sizes, steps=STEPS)
        assert misses.shape == (2, 2, 3) and not misses[:, 1].any()
        for row in range(2):
            for number, selected in enumerate(engine.selections(pattern, data, row, STEPS).values()):
                held, expected = set(range(TOPK)), 0
                for step, wanted in enumerate(selected[0]):
                    newest = 40 - STEPS + step
                    own = set(wanted.tolist()) - {newest}
                    expected += len(own - held)
                    if own >= held or len(own) == TOPK:
                        held = own
                    else:  # one place is left to what was used last before
                        break
                else:
                    assert misses[row, 0, number] == expected


def test_what_was_counted_is_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, data, told = tiny_engine(tiny_config()), random_tokens(3, 30), []

    def run() -> Any:
        with Journal(tmp_path, {"a": 1}, today()) as journal:
            return count_misses(
                engine, data, journal, Pattern("FSFSSF"), sizes=(8, 16), steps=4, done=lambda: told.append(1)
            )

    first = run()
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines[:-1]))  # a kill before the last sequence
    asked: list[int] = []
    real = engine.selections
    monkeypatch.setattr(
        engine, "selections", lambda pattern, data, row, steps: asked.append(row) or real(pattern, data, row, steps)
    )
    assert np.array_equal(run(), first) and asked == [2] and len(told) == 6


def test_bytes_are_those_of_sglangs_layout() -> None:
    """GLM-5 and DeepSeek-V3.2: 656 bytes a token in fp8, 1,152 in bfloat16, and 132 for an index key."""
    config = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    assert CacheBytes.of_dsa(config, "fp8_e4m3") == CacheBytes(
        kv=656, index=132, item=1, miss=656, piece=656, beside=64
    )
    size = CacheBytes.of_dsa(config, "bfloat16")
    assert size == CacheBytes(kv=1152, index=132, item=1, miss=1152, piece=1152, beside=64)
    pattern = Pattern("FSSF")
    assert size.on_host(pattern, 1000) == 4 * 1000 * 1152
    assert size.on_device(pattern, 100, 1000) == 4 * (100 + PAGE) * 1152 + 2 * 1000 * 132
    assert size.on_device(pattern, 1000, 1000) == 4 * 1000 * 1152 + 2 * 1000 * 132
    with pytest.raises(SearchError, match="no kv_lora_rank"):
        CacheBytes.of_dsa(SimpleNamespace(kv_lora_rank=None, qk_rope_head_dim=64, index_head_dim=128), "bfloat16")


def test_a_layer_that_chooses_waits_and_those_that_share_wait_for_the_rest() -> None:
    """By hand: layers of 1 ms; a layer's tokens travel 0.5 ms, then 3 ms."""

    def stall(letters: str, misses: list[float], batch: int = 1) -> float | None:
        server = Server(bandwidth=1e-3, step_ms=float(len(letters)), batch=batch)
        pattern = Pattern(letters, PAGES if "D" in letters else None)
        return stall_ms(pattern, dict(zip(selecting_layers(pattern), misses, strict=True)), 100, server)

    assert stall("FFFF", [5, 5, 5, 5]) == pytest.approx(2.0)
    assert stall("FSSS", [5]) == pytest.approx(0.5)  # 0.5 ms each, behind 1 ms of computation
    assert stall("FSSS", [30]) == pytest.approx(3 + 2 + 2 + 2)  # each waits 2 ms more than it computes
    assert stall("FSFS", [30, 0]) == pytest.approx(3 + 2)
    assert stall("FSSS", [15], batch=2) == stall("FSSS", [30])
    assert stall("FSSS", [0]) == 0
    unknown = Server(step_ms=1.0)
    assert stall_ms(Pattern("FS"), {0: 1.0}, 100, unknown) is None
    assert stall("DSSF", [30, 5]) == pytest.approx(3 + 2 + 0.5)  # what D chose travels from its end on
    assert stall("DSSF", [5, 5]) == pytest.approx(0.5 + 0.5)  # the second of them comes while the first computes
    assert stall("DDDD", []) == 0


def test_the_line_for_sglang_has_host_memory_for_the_context() -> None:
    assert json.loads(hisparse_config(2048, 4096, 131072)) == {
        "top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": 32
    }  # fmt: skip
    assert json.loads(hisparse_config(2048, 4096, 4096))["host_to_device_ratio"] == 2


def test_the_command_counts_predicts_and_resumes(
    model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", model_folder, "--evaluation", token_file, "--seq-len", 32, "--num-sequences", 3,
               "--decode-steps", 8, "--pattern", "uniform@1/3", "--pattern", f"mine=F{'S' * (LAYERS - 1)}",
               "--buffers", "2,1", "--device", "cpu", "--server",
               "kv_dtype=bfloat16,bandwidth=0.001,step_ms=6,batch=4,memory_gb=0.001,context=64",
               "--output", tmp_path / "out"]  # fmt: skip
    done = offload(*options)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "offload.json").read_text())
    assert [plan["name"] for plan in result["plans"]] == ["baseline", "uniform 1/3", "mine"]
    assert result["bandwidth_from"] == "given"
    assert {(plan["kv_bytes"], plan["selected"], plan["item"]) for plan in result["plans"]} == {(48, TOPK, 1)}
    first, second = (plan["kl"] for plan in result["plans"][:2])
    assert first["mean"] == first["stderr"] == 0.0 != second["mean"]
    for plan in result["plans"]:
        once, twice = plan["buffers"]
        assert (once["size"], twice["size"]) == (TOPK, 2 * TOPK)
        assert once["exposed"]["mean"] > twice["exposed"]["mean"] > 0
        assert once["stall_ms"] > twice["stall_ms"] > 0 and once["step_ms"] == pytest.approx(6 + once["stall_ms"])
        assert once["requests"] == int(1e6 // once["device_bytes"])
        sharing = LAYERS - plan["pattern"].count("F")
        assert (once["hidden"]["mean"] > 0) == (sharing > 0)
        total = once["exposed"]["mean"] + once["hidden"]["mean"]
        assert once["bytes_a_step"] == pytest.approx(48 * total)
    one = result["plans"][2]["buffers"][0]
    assert one["hidden"]["mean"] == pytest.approx(one["exposed"]["mean"] * (LAYERS - 1))
    page = (tmp_path / "out" / "offload.html").read_text()
    assert "<svg" in page and "host_to_device_ratio" in page and "mine" in page

    def never(*_: object) -> None:
        raise AssertionError("counted before")

    monkeypatch.setattr(TransformersEngine, "selections", never)
    again = offload(*options)
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "out" / "offload.json").read_text()) == result
    other = offload(*options, "--decode-steps", 9)
    assert other.exit_code == 2 and "belongs to a search with data" in other.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--buffers", "1,x"], "'--buffers': sizes: found 'x', expected a number"),
        (["--buffers", "0.5"], "'--buffers': sizes: found 0.5, expected 1 to 1000"),
        (["--buffers", "1e6"], "'--buffers': sizes: found 1e+06, expected 1 to 1000"),
        (["--buffers", "nan"], "'--buffers': sizes: found nan, expected 1 to 1000"),
        (["--server", "kv_dtype=int4"], "kv_dtype: found 'int4', expected one of bfloat16, fp8_e4m3"),
        (["--decode-steps", "30"], "--decode-steps is 30, expected at most 24"),
        (["--seq-len", "9"], "--decode-steps is 8, expected at most 1"),
        (["--pattern", "FS"], OTHER_LENGTH.format(2, 6)),
        (["--pattern", "DSSSSS"], "the model's own indexers choose; expected F and S alone"),
    ],
)
def test_bad_input_gets_one_line(
    options: list[str], expected: str, model_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    given = ["--model", model_folder, "--evaluation", token_file, "--seq-len", 32, "--decode-steps", 8]
    done = offload(*given, "--output", tmp_path, *options)
    assert done.exit_code == 2, done.output
    assert expected in " ".join(done.output.split()), done.output


def test_models_whose_cache_is_kept_otherwise_are_refused(token_file: Path, tmp_path: Path, dense_folder: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_v4_config()))
    done = offload("--model", tmp_path, "--evaluation", token_file, "--output", tmp_path.with_suffix(".out"))
    assert done.exit_code == 2 and "of the family deepseek_v4; expected one of dsa, dense_gqa" in done.output
    done = offload("--model", dense_folder, "--output", tmp_path)
    assert done.exit_code == 2 and "--evaluation is missing" in done.output


@pytest.mark.parametrize(
    ("piece", "moved"), [(1152, 1152), (661, 656), pytest.param(3, 8, marks=pytest.mark.slow), (1 << 20, 1 << 20)]
)
def test_the_bandwidth_is_of_pieces_from_anywhere(piece: int, moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are brought, each once; how long that takes is a device's affair."""
    calls = []

    def timed(call: Any) -> float:
        host, memory, chosen, slots, loads = call.args
        host.random_(0, 256)
        call()
        assert loads.all() and memory.shape == (64, chosen.shape[1], moved) and memory.is_contiguous()
        for row in (0, 63):
            assert len(set(chosen[row].tolist())) == chosen.shape[1] <= host.shape[1] // 4
            assert torch.equal(memory[row], host[row, chosen[row].long()])
        assert torch.equal(slots[0], torch.arange(chosen.shape[1], dtype=torch.int32))
        calls.append(memory.nbytes)
        return 2.0

    monkeypatch.setattr(bandwidth, "SIZE", 8 << 20)
    monkeypatch.setattr(bandwidth, "_milliseconds", timed)
    found = bandwidth.gather_bandwidth(torch.device("cpu"), piece)
    assert found == calls[-1] / 2e6


# -- dense models

FEW = "page_tokens=4,pages=3,recent_pages=1"


def dense_engine() -> PageEngine:
    config = tiny_dense_config()
    return PageEngine(tiny_model(config), describe(config, "tiny"))


def test_pages_that_decoding_chooses_are_numbered() -> None:
    """Those of each step alone, in their order; what is empty stands behind."""
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
