"""Compare the memory of scores that a server states with the rows that its layers lay out."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.dsa.blocks.context import ONE_RANK, Context
from sglang_indexcache.families.dsa.blocks.selection import BlockSelection, WholePlan, blocks_of, scored_rows
from sglang_indexcache.families.dsa.blocks.shards import ALONE
from sglang_indexcache.families.dsa.sglang import DsaSglang
from tests.served import DIM, SglangIndexer, sglang_modules

__all__ = ["sglang_modules"]
CPU, TOPK = torch.device("cpu"), 2048


def laid_out(prefix: int, rows: int, queries: int, ranks: int, here: Context = ONE_RANK) -> int:
    """Return the rows that one rank really hands to its indexer."""
    runs = blocks_of([prefix], [rows], queries, TOPK) if queries > 1 else []
    count = len(here.among(0, rows))
    if runs:
        plan = WholePlan.of(runs, [rows], queries, CPU, here)
        count = len((plan.mine or plan).first)
    shards = replace(ALONE, ranks=ranks)
    return len(shards.part(count, CPU, {}).own) if shards.pays(count, prefix + rows / 2) else count


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_those_that_a_rank_scores(seed: int) -> None:
    rng = random.Random(seed)
    prefix, rows = 64 * rng.randrange(3000), rng.choice([1, 100, 1500, 8192, rng.randrange(1, 9000)])
    queries, ranks, context = rng.choice([1, 2, 4, 8, 16, 64]), rng.choice([1, 2, 3, 8]), rng.choice([2, 4])
    assert scored_rows(prefix, rows, TOPK, queries, ranks) == laid_out(prefix, rows, queries, ranks)
    most = max(laid_out(prefix, rows, queries, 1, Context(rank, context, ALONE.gather)) for rank in range(context))
    found = -(-scored_rows(prefix, rows, TOPK, queries) // context)
    assert most - 2 <= found <= most  # blocks and other rows are divided each for itself


def attention(layer: int, letter: str, queries: int = 1) -> nn.Module:
    """SGLang's attention of one layer."""
    module = nn.Module()
    module.layer_id, module.skip_topk, module.next_skip_topk = layer, letter == "S", False
    module.indexer = SglangIndexer(torch.zeros(1, DIM))
    module.indexer.index_topk = TOPK
    if queries > 1:
        module.indexer._get_topk_ragged = BlockSelection(module.indexer, queries)
    return module


@pytest.mark.usefixtures("sglang_modules")
@pytest.mark.parametrize(
    ("queries", "more", "rows"),
    [
        ({0: 4, 2: 16}, {}, 8064 // 4 + 128),  # S layers of older SGLangs have indexers, which do not run
        ({0: 4}, {}, 8192),  # a layer without blocks among others
        ({}, {"enable_prefill_cp": True, "cp_strategy": "interleave", "attn_cp_size": 4}, 2048),
        ({}, {"attn_cp_size": 4}, 8192),
        ({}, {"chunked_prefill_size": -1}, 131072),  # prompts are read at once
        ({}, {"chunked_prefill_size": None}, 131072),
        ({}, {"chunked_prefill_size": 200_000}, 131072),
    ],
)
def test_a_server_says_it_of_what_was_loaded(
    queries: dict[int, int], more: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [attention(layer, letter, queries.get(layer, 1)) for layer, letter in enumerate("FSFS")]
    runner = SimpleNamespace(
        model=nn.ModuleList(layers),
        server_args=SimpleNamespace(**{"chunked_prefill_size": 8192, **more}),
        model_config=SimpleNamespace(context_len=202752),
        max_total_num_tokens=131072,  # fewer than the context
        token_to_kv_pool=None,
    )
    assert list(DSA.sglang.read_back(runner.model)[0]) == [
        item for layer, size in queries.items() for item in Pattern("FSFS").selecting_for(layer, size).indexers
    ]
    monkeypatch.setattr(DsaSglang, "saved", lambda self, runner: {})  # weights and keys have tests of their own
    assert DSA.sglang.saved(runner) == {"prompt_score_bytes": rows * 131072 * 4}
