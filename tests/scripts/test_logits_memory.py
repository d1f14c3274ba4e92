"""Memory of indexers' logits: the arithmetic, SGLang's own, and what is alive at once in SGLang's method."""

from __future__ import annotations

import importlib
import json
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.bench.kernels.logits_memory import (
    GIB,
    VARIANTS,
    Case,
    Variant,
    budget_bytes,
    cases,
    differing,
    main,
    parts_of,
    peak_bytes,
)
from sglang_indexcache.sglang.probes import SglangSource

K128, K200 = 131072, 204800


@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        (Variant(), 8192),
        (Variant(ranks=2), 4096),
        (Variant(ranks=8), 1024),
        (Variant(4), 8064 // 4 + 128),
        (Variant(16), 8064 // 16 + 128),
        (Variant(64), 8064 // 64 + 128),
        (Variant(4, ranks=8), 320),  # 2,144 rows are 34 stripes of 64: five for the first rank
        (Variant(16, ranks=8), 8064 // 16 + 128),  # too few to be shared out
    ],
    ids=lambda value: value.name if isinstance(value, Variant) else None,
)
def test_rows_are_those_that_the_plugin_lets_an_indexer_score(variant: Variant, rows: int) -> None:
    assert variant.rows(K128 - 8192, 8192) == rows


def test_short_and_odd_chunks() -> None:
    assert Variant(16).rows(0, 1500) == 1500  # everything is selected, so no block
    assert Variant(16).rows(1000, 5000) == 5000 - 15 * ((6000 - 128 - 2048) // 16)
    assert Variant(ranks=8).rows(0, 8192) == 8192  # 4,096 keys in the mean
    assert Variant(ranks=3).rows(K128, 8192) == 43 * 64  # 128 stripes
    assert Variant(ranks=8).rows(K128, 1023) == 1023


def test_bytes_of_a_chunk() -> None:
    assert peak_bytes([8192], K128) == 4 * GIB
    assert peak_bytes([1], 1) == 1024  # a row is at least 256 columns
    assert peak_bytes([3, 3, 1], 256) == 6 * 1024  # a part, and the one before
    assert peak_bytes([2, 1], 300) == 3 * 2048


def test_parts_fill_the_budget_and_small_ones_are_never_split() -> None:
    assert parts_of(8192, K128, 4 * GIB) == [8192]
    assert parts_of(8192, K128, 4 * GIB - 1) == [8191, 1]
    assert parts_of(100, 1000, 1) == [100]
    assert parts_of(10000, 1000, 1) == [1] * 10000  # a row at a time, if need be
    for rows, keys, budget in ((8192, K200, GIB), (8191, 12345, 10**8), (1, 10**7, 1)):
        parts = parts_of(rows, keys, budget)
        assert sum(parts) == rows and all(part * keys * 4 <= budget or part == 1 for part in parts)


def test_two_parts_need_as_much_as_one_and_blocks_need_one() -> None:
    """What an operator is told: splitting helps from three parts on, blocks and shared-out rows always."""
    budget = budget_bytes(int(139.8 * GIB), 100 * GIB, 0.85)
    found = {(case.keys, case.variant): case for case in cases([K128, K200], 8192, budget)}
    assert len(found) == 2 * len(VARIANTS)
    stock = found[K200, "stock"]
    assert stock.parts == 2 and stock.peak_bytes == stock.whole_bytes == 8192 * K200 * 4
    small = {(case.keys, case.variant): case for case in cases([K200], 8192, GIB)}[K200, "stock"]
    assert small.parts == 7 and 1.9 * GIB < small.peak_bytes <= 2 * GIB
    for name in ("q16", "q64", "stock, shared out over 8", "q4, shared out over 8"):
        assert found[K200, name].parts == 1 and found[K200, name].peak_bytes < GIB


def test_a_measurement_that_is_off_is_named() -> None:
    case = Case(K128, "stock", 8192, 4 * GIB, 1, 4 * GIB, 4 * GIB + 2**26)
    assert differing([case]) == []
    for wrong in (8 * GIB, 2 * GIB, 0):
        assert len(differing([replace(case, measured_bytes=wrong)])) == 1


def test_the_table_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lengths", "131072", "--output", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr().out
    assert "budget of SGLang: 4.19 GiB" in said and "| 131,072 | stock | 8,192 | 4.00 | 1 | 4.00 |" in said
    assert "measured" not in said
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["device"] is None and content["cases"][0]["measured_bytes"] is None


def read_sglang(name: str) -> Any:
    source = SglangSource.at_hand(None)
    if source is None or not source.version.startswith("0.5.23"):
        pytest.skip("the arithmetic is that of SGLang 0.5.23")
    return importlib.import_module(f"sglang.srt.layers.attention.{name}")


@pytest.mark.sglang
@pytest.mark.parametrize("static", [None, 0.7, 0.85, 0.9, 1.0])
@pytest.mark.parametrize("free", [1, 3 * GIB, 200 * GIB])
def test_the_budget_is_sglangs(static: float | None, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, total = read_sglang("mqa_logits_utils"), 150_000_000_001
    properties = SimpleNamespace(total_memory=total)
    device = SimpleNamespace(get_device_properties=lambda index: properties)
    monkeypatch.setattr(module, "get_device_module", lambda: device)
    monkeypatch.setattr(module, "get_schedule", lambda: SimpleNamespace(mem_fraction_static=static))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, total))
    found = module.mqa_logits_budget_bytes(device_index=0, allow_sync=True)
    if static is not None:
        assert found == budget_bytes(total, free, static)
    for rows, keys in ((8192, K128), (8192, K200), (632, K200), (100, 1000), (8192, 976), (8192, 977)):
        split, allowed = module.mqa_logits_should_chunk(
            num_rows=rows, num_cols=keys, get_budget_bytes=lambda: found, rocm=False
        )
        assert split == (len(parts_of(rows, keys, found)) > 1 or (rows == 1 and allowed < 4 * keys))


class Queries:
    """Index queries of a device with a number."""

    device = SimpleNamespace(index=0)

    def __init__(self, rows: int) -> None:
        self.shape = (rows, 1, 128)

    def __getitem__(self, part: slice) -> Queries:
        return Queries(len(range(self.shape[0])[part]))


@pytest.mark.sglang
@pytest.mark.parametrize(("budget", "parts"), [(2**40, 1), (20_000_000, 2), (8_192_000, 5)])
def test_sglangs_method_has_two_parts_at_once(budget: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, rows, keys = read_sglang("dsa.dsa_indexer"), 4096, 2048
    for name in ("_is_hip", "_is_xpu", "_is_fp8_fnuz"):
        monkeypatch.setattr(module, name, False)
    pool = SimpleNamespace(
        index_page_size=64,
        get_index_k_scale_buffer=lambda *given: (
            torch.zeros(keys, 128, dtype=torch.uint8),
            torch.zeros(keys, 4, dtype=torch.uint8),
        ),
    )
    monkeypatch.setattr(module, "get_token_to_kv_pool", lambda: pool)
    made: list[weakref.ref[Any]] = []
    most = 0

    def score(q: Queries, *given: Any, clean_logits: bool) -> Any:
        nonlocal most
        logits = torch.empty(q.shape[0], keys)
        made.append(weakref.ref(logits))
        most = max(most, sum(alive.nbytes for one in made if (alive := one()) is not None))
        return logits

    monkeypatch.setattr(module, "resolve_fp8_mqa_logits_fn", lambda: score)
    every = torch.arange(rows, dtype=torch.int32)
    metadata = SimpleNamespace(
        attn_metadata=SimpleNamespace(topk_indices_offset=every),
        get_logical_page_table=lambda: torch.zeros(1, 32),
        get_indexer_kvcache_range=lambda: (every, every),
        get_indexer_seq_len_cpu=lambda: torch.tensor([keys]),
        get_indexer_seq_len=lambda: torch.tensor([keys]),
        get_seqlens_expanded=lambda: every,
        get_token_to_batch_idx=lambda: every,
        topk_transform=lambda logits, topk, **given: torch.zeros(len(logits), topk, dtype=torch.int32),
    )
    indexer = SimpleNamespace(
        index_topk=4,
        _MQA_LOGITS_BYTES_PER_ELEM=4,
        _get_mqa_logits_budget_bytes=lambda index: budget,
        _with_real_sm_count=nullcontext,
        _pad_heads_for_deep_gemm=lambda q, weights: (q, weights, 1),
        _mask_init_and_local_tokens=lambda *given: None,
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
        seq_lens_cpu=torch.tensor([keys]),
        extend_seq_lens_cpu=[rows],
    )
    weights, result = torch.zeros(rows, 1, 1), torch.zeros(rows, 4, dtype=torch.int32)
    module.Indexer._get_topk_ragged(indexer, False, batch, 0, Queries(rows), weights, metadata, result)
    expected = parts_of(rows, keys, budget)
    assert len(made) == len(expected) == parts and most == peak_bytes(expected, keys)
