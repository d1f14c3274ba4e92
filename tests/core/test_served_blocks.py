"""What SGLang's indexers would select in blocks of prompt queries, without SGLang: against the definition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from indexcache_search.hf.indexers import block_selection
from sglang_indexcache import Pattern
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.dsa.blocks import patch_indexers
from sglang_indexcache.families.dsa.blocks import selection as blocks
from sglang_indexcache.families.dsa.needs import BLOCKS, DECODING, PREFILL
from sglang_indexcache.families.hy_v4 import HY_V4
from sglang_indexcache.io.errors import PatternError, ProofError
from sglang_indexcache.io.messages import NO_INDEXER, WOULD_RUN
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS, IndexerSetting
from sglang_indexcache.serving.preflight import refused_flags
from sglang_indexcache.serving.proof import other_indexers
from sglang_indexcache.serving.ranks import RankReport, read_back
from sglang_indexcache.sglang.attention import Observed
from tests.served import (
    CALLS,
    DIM,
    HEADS,
    PAGED,
    RAGGED,
    TOPK,
    UNFUSED,
    Call,
    Metadata,
    SglangIndexer,
    sglang_modules,
)

__all__ = ["sglang_modules"]
pytestmark = pytest.mark.usefixtures("sglang_modules")


@pytest.mark.parametrize("seed", range(200))
def test_blocks_are_whole_before_the_end_and_have_a_choice(seed: int) -> None:
    rng = random.Random(seed)
    queries, topk = rng.choice([2, 4, 8, 16, 64]), rng.choice([16, 64, 100])
    prefixes = [rng.choice([0, rng.randrange(500), 64 * rng.randrange(8)]) for _ in range(rng.randrange(1, 4))]
    lengths = [rng.choice([1, rng.randrange(1, 700)]) for _ in prefixes]
    expected = []
    row = 0
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        for begin in range(0, prefix + length, queries):
            last = begin + queries - 1
            exact = prefix + length - EXACT_ROWS
            if begin >= prefix and last < exact and last >= topk:
                expected.append((row + begin - prefix, begin, request))
        row += length
    assert single_blocks(blocks.blocks_of(prefixes, lengths, queries, topk), queries) == expected


def single_blocks(runs: Sequence[blocks.Run], queries: int) -> list[tuple[int, int, int]]:
    """Of each block the row and position of its first query, and the request."""
    return [
        (run.row + step, run.begin + step, run.request)
        for run in runs
        for step in range(0, run.count * queries, queries)
    ]


@pytest.mark.parametrize("seed", range(50))
def test_every_query_of_a_pass_is_in_one_row_of_its_plan(seed: int) -> None:
    rng = random.Random(seed)
    queries, topk = rng.choice([2, 4, 16]), rng.choice([16, 64])
    prefixes = [rng.choice([0, rng.randrange(500)]) for _ in range(rng.randrange(1, 5))]
    lengths = [rng.choice([1, rng.randrange(1, 700)]) for _ in prefixes]
    runs = blocks.blocks_of(prefixes, lengths, queries, topk)
    if not runs:
        return
    plan = blocks.WholePlan.of(runs, lengths, queries, torch.device("cpu"))
    expected = single_blocks(runs, queries)
    columns = zip(plan.first.tolist(), plan.begins.tolist(), strict=True)
    assert list(columns)[: plan.blocks] == [(row, begin) for row, begin, _ in expected]
    assert plan.sizes[: plan.blocks].unique().tolist() == [queries]
    assert torch.cat([plan.members, torch.arange(sum(lengths))[plan.exact]]).sort().values.tolist() == list(
        range(sum(lengths))
    )
    assert (plan.sizes[plan.blocks :] == 1).all() and (plan.begins[plan.blocks :] == 0).all()
    assert plan.begin == (expected[0][0] if len(runs) == 1 else None)


@pytest.mark.parametrize("kind", [PAGED, RAGGED, UNFUSED])
@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_selections_are_the_definitions(kind: str, chunk: int | None, call: Call) -> None:
    """Of three requests, two with a prefix, in every index space, however SGLang calls the method."""
    torch.manual_seed(0)
    queries, prefixes, lengths = 4, [0, 70, 128], [200, 300, 1]
    totals = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    keys, metadata = torch.randn(sum(totals), DIM), Metadata(prefixes, lengths, kind)
    indexer = SglangIndexer(keys)
    indexer.chunk = chunk
    q, w = torch.randn(sum(lengths), HEADS, DIM), torch.rand(sum(lengths), HEADS, 1)
    batch = SimpleNamespace(extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=lengths)
    given_q, given_w, buffer = call.given(q, w)
    found = blocks.BlockSelection(indexer, queries)(False, batch, 0, given_q, given_w, metadata, buffer)
    assert found is buffer or (buffer is None and len(found) == len(given_q))
    assert (found[sum(lengths) :] == -1).all()

    plan = single_blocks(blocks.blocks_of(prefixes, lengths, queries, TOPK), queries)
    assert {request for _, _, request in plan} == {0, 1}
    exact = indexer._get_topk_ragged(False, batch, 0, q, w, metadata)
    row = 0
    for number, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        own, base = slice(row, row + length), sum(totals[:number])
        prompt = torch.zeros(1, totals[number], dtype=torch.bool)
        for _, begin, request in plan:
            if request == number:
                prompt[0, begin : begin + queries] = True
        padded_q, padded_w = torch.zeros(1, totals[number], HEADS, DIM), torch.zeros(1, totals[number], HEADS)
        padded_q[0, prefix:], padded_w[0, prefix:] = q[own], w[own, :, 0]
        wanted = block_selection(
            padded_q, keys[None, base : base + totals[number]], padded_w, queries, TOPK, prompt=prompt
        )
        for at in range(length):
            if not prompt[0, prefix + at]:
                assert found[row + at].tolist() == exact[row + at].tolist()
                continue
            positions = wanted[0, prefix + at]
            positions = positions[positions >= 0]
            if kind == RAGGED:
                positions = positions + base
            elif kind == PAGED:
                positions = metadata.attn_metadata.page_table_1[number, positions]
            selected, rest = found[row + at].split([len(positions), TOPK - len(positions)])
            assert set(selected.tolist()) == set(positions.tolist()) and (rest == -1).all()
        row += length


def test_short_prompts_are_sglangs_alone() -> None:
    keys, lengths = torch.randn(150, DIM), [150]
    metadata, batch = (
        Metadata([0], lengths, PAGED),
        SimpleNamespace(extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=lengths),
    )
    q, w = torch.randn(150, HEADS, DIM), torch.rand(150, HEADS, 1)
    indexer = SglangIndexer(keys)
    found = blocks.BlockSelection(indexer, 64)(False, batch, 0, q, w, metadata)
    assert torch.equal(found, indexer._get_topk_ragged(False, batch, 0, q, w, metadata))


def test_some_rows_of_a_prompt_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """As of an SGLang that shares out rows by itself: a mean of queries of other rows would be a silent mistake."""
    keys, batch = torch.randn(300, DIM), SimpleNamespace(extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[300])
    q, w = torch.randn(300, HEADS, DIM), torch.rand(300, HEADS, 1)
    for rows, gates in ((150, 150), (150, 300), (300, 299)):
        with pytest.raises(SystemExit):
            blocks.BlockSelection(SglangIndexer(keys), 4)(
                False, batch, 0, q[:rows], w[:gates], Metadata([0], [300], PAGED)
            )
        assert f"selects for {rows} queries with {gates} gates at once, expected at least the 300" in (
            capsys.readouterr().err
        )


def test_errors_of_ours_end_the_process_and_sglangs_pass(capsys: pytest.CaptureFixture[str]) -> None:
    keys, batch = torch.randn(300, DIM), SimpleNamespace(extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[300])
    q, w = torch.randn(300, HEADS, DIM), torch.rand(300, HEADS, 1)
    indexer = SglangIndexer(keys)
    with pytest.raises(SystemExit) as end:
        blocks.BlockSelection(indexer, 4)(False, batch, 0, q, w, Metadata([0], [300], "OTHER"))
    assert end.value.code == 2 and "selections as OTHER, expected PAGED or RAGGED" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        blocks.BlockSelection(indexer, 4)(False, SimpleNamespace(), 0, q, w, Metadata([0], [300], PAGED))
    with pytest.raises(SystemExit):  # an argument that nobody knows
        blocks.BlockSelection(indexer, 4)(False, batch, 0, q, w, Metadata([0], [300], PAGED), other=1)
    with pytest.raises(RuntimeError):  # shapes that SGLang's method does not take
        blocks.BlockSelection(indexer, 4)(False, batch, 0, q[..., :3], w, Metadata([0], [300], PAGED))


def test_what_is_proven() -> None:
    pattern = Pattern.parse("FSFF+2q4+3q16")
    both = pattern.indexers
    assert other_indexers(pattern, {0, 1, 2, 3}, both) is None
    assert other_indexers(pattern, {0, 1}, ()) is None  # a pipeline stage without them
    assert other_indexers(pattern, {2, 3}, both[:1]) == (
        f"the indexer of layer 3 {WOULD_RUN} one that scores everything, the pattern says 3q16"
    )
    assert other_indexers(Pattern("FSFF"), {2, 3}, both[:1]) == (
        f"the indexer of layer 2 {WOULD_RUN} 2q4, the pattern says that it scores everything"
    )
    stages = [
        RankReport(fingerprint="", layers=(0, 1), roles="FS--"),
        RankReport(fingerprint="", layers=(2, 3), roles="--FF", indexers=both),
    ]
    assert read_back(stages, None) == pattern
    assert (
        read_back([RankReport(fingerprint="", layers=(0, 1, 2, 3), roles="FSFF", indexers=both)] * 2, None) == pattern
    )


def indexer() -> SglangIndexer:
    return SglangIndexer(torch.zeros(1, DIM))


def modules(*indexers: Any) -> list[tuple[int, Any]]:
    return list(enumerate(SimpleNamespace(indexer=item) for item in indexers))


def test_modules_are_read_back() -> None:
    """What is not there, and what somebody else put there, is seen."""
    plain, in_blocks = indexer(), indexer()
    patch_indexers.install(modules(plain, None, in_blocks), Pattern.parse("FSFF+2q4+3q4"))  # layer 3 is elsewhere
    assert list(patch_indexers.read_back(modules(plain, None, in_blocks))[0]) == [IndexerSetting(layer=2, queries=4)]
    observed = [Observed(item, PREFILL, lambda *args: None) for item in (plain, in_blocks)]
    assert list(patch_indexers.read_back(modules(plain, None, in_blocks))[0]) == [IndexerSetting(layer=2, queries=4)]
    for item in observed:
        item.remove()
    for method in (PREFILL, DECODING):
        other = indexer()
        setattr(other, method, print)
        with pytest.raises(ProofError, match="layer 0 selects by builtin_function_or_method, expected SGLang's own"):
            patch_indexers.read_back(modules(other))
    in_blocks._get_topk_paged = print  # type: ignore[assignment]
    with pytest.raises(ProofError, match="layer 0 selects by BlockSelection, builtin_function_or_method, expected"):
        patch_indexers.read_back(modules(in_blocks))


def test_indexers_of_other_kinds_are_refused() -> None:
    local, other = indexer(), type("Other", (SglangIndexer,), {PREFILL: lambda self: None})(torch.zeros(1, DIM))
    local.num_local_tokens = 4
    for refused, text, line in (
        (local, "F+0q4", "always selects the first or last tokens"),
        (other, "F+0q4", "Other selects in a way of its own"),
        (None, "F+0q4", f"layer 0 should select in blocks, but the loaded model has {NO_INDEXER}"),
        (indexer(), "F+0q64", "layer 0 selects for 64 queries at a time, expected at most index_topk"),
    ):
        with pytest.raises(ProofError, match=line):
            patch_indexers.install(modules(refused), Pattern.parse(text))


def test_kernels_that_read_as_many_keys_for_every_query_are_refused() -> None:
    """FA3 and TRT-LLM's; rows of a block end with -1, where those would read a page that is not there."""
    blocks, plain = Pattern.parse("FSFF+2q4"), Pattern("FSFF")

    def runner(kernel: str) -> Any:
        return SimpleNamespace(attn_backend=SimpleNamespace(dsa_prefill_impl=kernel))

    for kernel in ("flashmla_sparse", "flashmla_sparse_q8", "flashmla_kv", "triton_sparse_mla", "tilelang"):
        DSA.sglang.captured(runner(kernel), blocks)
        DSA.sglang.captured(
            SimpleNamespace(attn_backend=SimpleNamespace(prefill_backend=runner(kernel).attn_backend)), blocks
        )
    for kernel in ("fa3", "trtllm", "flashinfer_sparse_mla", "new"):
        DSA.sglang.captured(runner(kernel), plain)
        with pytest.raises(ProofError, match=f"--dsa-prefill-backend {kernel} can't be combined with 2q4"):
            DSA.sglang.captured(runner(kernel), blocks)
    with pytest.raises(ProofError, match="--dsa-prefill-backend None"):
        DSA.sglang.captured(SimpleNamespace(attn_backend=object()), blocks)


def test_what_servers_refuse() -> None:
    assert DSA.sglang.to_overrides({}, Pattern.parse("FSFF+2q4"))["index_topk_pattern"] == "FSFF"
    assert DSA.sglang.needed(Pattern.parse("FSFF+2q4+3q4")) == (BLOCKS,) and not DSA.sglang.needed(Pattern("FSFF"))
    assert HY_V4.sglang.needed(Pattern.parse("FSFF+2q4")) == (BLOCKS,)
    with pytest.raises(PatternError, match="2q4 is not served yet"):
        DEEPSEEK_V4.sglang.to_overrides({}, Pattern.parse("FSFF+2q4"))
    for name in DSA.sglang.refused_with_blocks:
        given: Any = 2 if name.endswith("size") else True
        [(flag, reason)] = refused_flags(DSA.sglang.refused_with_blocks, SimpleNamespace(**{name: given}))
        assert flag.startswith("--") and "never tried" in reason
