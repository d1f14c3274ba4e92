"""Rows of prompts over tensor-parallel ranks: all get what one rank alone selects, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_indexcache import Pattern
from sglang_indexcache.families import known_families
from sglang_indexcache.families.dsa.blocks import patch_indexers, shards
from sglang_indexcache.families.dsa.blocks import selection as blocks
from sglang_indexcache.families.dsa.blocks.adapter import with_blocks
from sglang_indexcache.families.dsa.blocks.rows import PrefillSelection
from sglang_indexcache.families.dsa.blocks.shards import ALONE, Shards
from sglang_indexcache.families.dsa.needs import GROUPING, PREFILL
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.messages import NO_INDEXER
from sglang_indexcache.serving.proven import Proof, ProofHolder
from sglang_indexcache.serving.ranks import RankReport, disagreement
from tests.served import CALLS, DIM, HEADS, PAGED, RAGGED, UNFUSED, Call, Metadata, SglangIndexer, sglang_modules
from tests.two_ranks import in_threads

__all__ = ["sglang_modules"]
pytestmark = pytest.mark.usefixtures("sglang_modules")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST_ROWS", 40)
    monkeypatch.setattr(shards, "LEAST_KEYS", 19)
    monkeypatch.setattr(shards, "STRIPE", 8)


def on_ranks(ranks: int, run: Callable[[Shards], Any]) -> list[Any]:
    return in_threads(ranks, run, Shards)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_selected_for_once_and_stands_where_it_was(seed: int) -> None:
    rng = random.Random(seed)
    ranks, count = rng.randrange(2, 9), rng.choice([1, 39, 40, 41, rng.randrange(40, 600)])
    rows: list[list[int]] = [[] for _ in range(ranks)]

    def run(own: Shards) -> Tensor:
        part = own.part(count, torch.device("cpu"), {})
        rows[own.rank] += part.own.tolist()
        return own.exchange(torch.stack([part.own, 3 * part.own], 1).int(), part)

    wanted = torch.stack([torch.arange(count), 3 * torch.arange(count)], 1).int()
    assert all(torch.equal(found, wanted) for found in on_ranks(ranks, run))
    assert sorted({row for mine in rows for row in mine}) == list(range(count))
    share = ceil(ceil(count / 8) / ranks) * 8
    assert {len(mine) for mine in rows} == {share}
    distinct = [set(mine) - {count - 1} for mine in rows]  # the last row fills up what is too short
    assert sum(map(len, distinct)) == count - 1
    pays = Shards(0, ranks, lambda every, own: None).pays
    assert [pays(39, 19), pays(40, 18.5), pays(40, 19)] == [False, False, True]


@pytest.mark.parametrize("kind", [PAGED, RAGGED, UNFUSED])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3, 8])
@pytest.mark.parametrize("queries", [None, 4], ids=["exact", "blocks"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_selections_are_those_of_one_rank(kind: str, ranks: int, queries: int | None, call: Call) -> None:
    """Of three requests, two with a prefix, however SGLang calls the method; exact layers are SGLang's own."""
    torch.manual_seed(0)
    prefixes, lengths = [0, 70, 128], [200, 300, 1]
    keys, metadata = torch.randn(sum(prefixes) + sum(lengths), DIM), Metadata(prefixes, lengths, kind)
    q, w = torch.randn(sum(lengths), HEADS, DIM), torch.rand(sum(lengths), HEADS, 1)

    def run(own: Shards) -> Tensor:
        indexer = SglangIndexer(keys)
        batch = SimpleNamespace(extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=lengths)
        given_q, given_w, buffer = call.given(q, w)
        made = PrefillSelection(indexer, own) if queries is None else blocks.BlockSelection(indexer, queries, own)
        return made(False, batch, 0, given_q, given_w, metadata, buffer)

    wanted = run(ALONE)
    if queries is None:
        own = SglangIndexer(keys)._get_topk_ragged(False, None, 0, q, w, metadata)
        assert torch.equal(wanted[: sum(lengths)], own)
    assert (wanted[sum(lengths) :] == -1).all()
    assert all(torch.equal(found, wanted) for found in on_ranks(ranks, run))


@pytest.mark.parametrize("lengths", [[39], [37, 37]], ids=["few rows", "few keys"])
def test_short_passes_are_sglangs_alone(lengths: list[int]) -> None:
    keys, prefixes, rows = torch.randn(sum(lengths), DIM), [0] * len(lengths), sum(lengths)
    metadata = Metadata(prefixes, lengths, PAGED)
    batch = SimpleNamespace(extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=lengths)
    q, w = torch.randn(rows, HEADS, DIM), torch.rand(rows, HEADS, 1)
    nobody = Shards(1, 2, lambda every, own: pytest.fail("ranks met"))
    found = PrefillSelection(SglangIndexer(keys), nobody)(False, batch, 0, q, w, metadata)
    assert torch.equal(found, SglangIndexer(keys)._get_topk_ragged(False, batch, 0, q, w, metadata))


def modules() -> dict[int, Any]:
    return {layer: SimpleNamespace(indexer=SglangIndexer(torch.zeros(1, DIM))) for layer in range(4)}


def test_layers_that_share_out_rows_are_read_back() -> None:
    """F layers do, those in blocks as well, S layers don't."""
    found, pattern = modules(), Pattern.parse("FSFF+2q4")
    patch_indexers.install(found.items(), pattern)
    assert patch_indexers.read_back(found.items())[1] == {}
    patch_indexers.share_rows(found.items(), pattern, Shards(0, 2, lambda every, own: None))
    assert patch_indexers.read_back(found.items())[1] == {0: 2, 2: 2, 3: 2}
    assert patch_indexers.read_back(found.items())[0] == pattern.indexers
    assert not hasattr(found[1].indexer, "__dict__") or PREFILL not in vars(found[1].indexer)


def test_what_can_not_share_out_rows() -> None:
    pattern = Pattern("FSFF")
    with pytest.raises(ProofError, match="shares out rows over the ranks of attention, and there is one"):
        patch_indexers.share_rows(modules().items(), pattern, ALONE)
    two = Shards(0, 2, lambda every, own: None)
    lacking = {**modules(), 2: SimpleNamespace()}
    with pytest.raises(ProofError, match=f"layer 2 should share out rows, but the loaded model has {NO_INDEXER}"):
        patch_indexers.share_rows(lacking.items(), pattern, two)
    local = modules()
    local[3].indexer.num_local_tokens = 4
    with pytest.raises(ProofError, match="layer 3 always selects the first or last tokens, so it can't share out"):
        patch_indexers.share_rows(local.items(), pattern, two)
    foreign = modules()
    vars(foreign[0].indexer)[PREFILL] = print
    with pytest.raises(ProofError, match="layer 0 selects by builtin_function_or_method, expected SGLang's own"):
        patch_indexers.read_back(foreign.items())


def test_ranks_of_which_only_some_share_out_rows_are_refused() -> None:
    """They would wait for each other; the status says how many layers do."""
    pattern = Pattern("FS")
    one = RankReport(fingerprint=pattern.fingerprint, layers=(0, 1), roles="FS", shared_rows={0: 2}, shard=True)
    other = replace(one, shard=False)
    without_f = replace(one, layers=(1,), roles="-S", shared_rows={})  # a pipeline stage
    assert disagreement(pattern, [one, one]) is None and disagreement(pattern, [one, without_f]) is None
    assert "rank 1 and rank 0 don't both share out indexers" in str(disagreement(pattern, [one, other]))
    holder = ProofHolder()
    holder.set(Proof(pattern, 2, 2, {0: 2}))
    assert {key: value for key, value in holder.status("x").items() if "sharded" in key} == {
        "sharded_layers": 1,
        "sharded_ranks": 2,
    }


def test_which_families_have_blocks_and_shared_rows() -> None:
    found = {family.name: with_blocks(family.sglang) for family in known_families()}
    assert {name: blocks.grouping for name, blocks in found.items() if blocks is not None} == {
        "dsa": GROUPING,
        "hy_v4": None,
    }
