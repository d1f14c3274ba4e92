"""indexcache-offload: what decode steps select, what they bring to the device, and what that is taken to cost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from extras.lab.tests.offloading import STEPS, offload
from indexcache_lab.offload import bandwidth
from indexcache_lab.offload.advice import PAGE, CacheBytes, hisparse_config, selecting_layers, stall_ms
from indexcache_lab.offload.counting import count_misses
from indexcache_lab.offload.server import Server
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.identity import today
from indexcache_search.evaluation.journal import Journal
from sglang_indexcache import Pattern
from sglang_indexcache.io.messages import OTHER_LENGTH
from tests.conftest import (
    LAYERS,
    PAGES,
    TOPK,
    random_tokens,
    tiny_config,
    tiny_engine,
    tiny_v4_config,
)


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
