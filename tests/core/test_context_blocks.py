"""Blocks of queries where context parallelism shares out rows: each rank has its part of what one rank selects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from extras.launch.tests.test_combinations import on_cpu
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.dsa.blocks import grouped, patch_indexers
from sglang_indexcache.families.dsa.blocks import selection as blocks
from sglang_indexcache.families.dsa.blocks.adapter import BlocksAdapter
from sglang_indexcache.families.dsa.blocks.context import ONE_RANK, Context
from sglang_indexcache.serving import proof
from sglang_indexcache.serving.preflight import refusals_of
from sglang_indexcache.serving.proven import Proof, ProofHolder
from tests.core.test_grouped import Backend, attend, placed
from tests.served import DIM, HEADS, PAGED, RAGGED, TOPK, UNFUSED, Metadata, SglangIndexer, put_modules, sglang_modules
from tests.two_ranks import in_threads, on_two_ranks

__all__ = ["sglang_modules"]
pytestmark = pytest.mark.usefixtures("sglang_modules")

PASSES = {  # tokens read before, and in the pass, of each request
    "one": ([0], [300]),
    "a chunk in the middle": ([64], [256]),
    "a chunk that begins within a block": ([133], [301]),
    "mixed lengths": ([0, 70, 128, 3], [200, 300, 1, 145]),
    "decoding in between": ([50, 0, 9, 17, 0], [1, 301, 1, 1, 200]),  # mixed chunks
    "nothing to share": ([0, 9], [100, 7]),
}


def on_ranks(ranks: int, run: Callable[[Context], Any]) -> list[Any]:
    return in_threads(ranks, run, Context)


class Pass:
    """A forward pass of several requests, whole or of one rank."""

    def __init__(self, prefixes: Sequence[int], lengths: Sequence[int], kind: str, dtype: torch.dtype) -> None:
        self.prefixes, self.lengths, self.metadata = list(prefixes), list(lengths), Metadata(prefixes, lengths, kind)
        rows = sum(lengths)
        self.keys = torch.randn(sum(prefixes) + rows, DIM)
        self.q, self.w = torch.randn(rows, HEADS, DIM).to(dtype), torch.rand(rows, HEADS, 1)

    def batch(self, here: Context) -> Any:
        """SGLang's `ForwardBatch`."""
        shared_out = None if here is ONE_RANK else object()
        return SimpleNamespace(
            extend_prefix_lens_cpu=self.prefixes, extend_seq_lens_cpu=self.lengths, attn_cp_metadata=shared_out
        )

    def select(self, here: Context, queries: int, padding: int = 0, chunk: int | None = None) -> Tensor:
        """What the rows of a rank attend to, less what SGLang adds to positions; those of padding to nothing."""
        found = self.call(here, queries, self.batch(here), padding, chunk)
        rows = len(found) - padding
        assert (found[rows:] == -1).all()
        offsets = self.metadata.of_rank(here.rank, here.ranks)[0].attn_metadata.topk_indices_offset
        return found[:rows] if offsets is None else torch.where(found[:rows] < 0, -1, found[:rows] - offsets[:, None])

    def call(self, here: Context, queries: int, batch: Any, padding: int = 0, chunk: int | None = None) -> Tensor:
        """What SGLang gets for the rows of a rank and rows of padding, in layer 2."""
        metadata, kept = self.metadata.of_rank(here.rank, here.ranks)
        indexer = SglangIndexer(self.keys[kept])
        indexer.chunk = chunk
        q, w = self.q[here.rank :: here.ranks], self.w[here.rank :: here.ranks]
        q, w = (torch.cat([item, item.new_full((padding, *item.shape[1:]), torch.nan)]) for item in (q, w))
        return blocks.BlockSelection(indexer, queries, ranks=here)(False, batch, 2, q, w, metadata)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """The rows of a pass from those of all ranks."""
    found = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    for rank, part in enumerate(parts):
        found[rank :: len(parts)] = part
    return found


@pytest.mark.parametrize("kind", [PAGED, RAGGED, UNFUSED])
@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4)), 3, 8])
@pytest.mark.parametrize("queries", [2, 4, TOPK])
@pytest.mark.parametrize("name", PASSES)
def test_selections_are_those_of_one_rank(kind: str, ranks: int, queries: int, name: str) -> None:
    """Bit for bit; blocks of fewer queries than ranks, passes that ranks don't divide, and rows of padding, too."""
    torch.manual_seed(0)
    made = Pass(*PASSES[name], kind, torch.float32)
    wanted = made.select(ONE_RANK, queries)
    padding, chunk = random.Random(name).choice([(0, None), (3, 37)])
    parts = on_ranks(ranks, lambda here: made.select(here, queries, padding, chunk))
    assert torch.equal(whole(parts), wanted)


def test_leaders_are_those_of_one_rank() -> None:
    """Queries travel as they are, so that means are the same numbers, whatever the dtype."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        q, w = torch.randn(301, HEADS, DIM).to(dtype), torch.rand(301, HEADS, 1)

        def run(here: Context, q: Tensor = q, w: Tensor = w) -> tuple[Tensor, Tensor]:
            rows = (
                item[here.rank :: here.ranks]
                if item.itemsize > 1
                else item.view(torch.uint8)[here.rank :: here.ranks].view(item.dtype)
                for item in (q, w)
            )
            return here.queries(*rows, 301)

        for found_q, found_w in on_ranks(4, run):
            assert found_q.dtype == dtype
            rank_by_rank = (
                item.float().unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1) for item in (found_q, found_w)
            )
            for found, wanted in zip(rank_by_rank, (q, w), strict=True):
                assert torch.equal(found[:301], wanted.float())


@pytest.mark.parametrize("seed", range(60))
def test_random_passes(seed: int) -> None:
    """Chunks, prefix hits and requests of one token, in any order."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    requests = rng.randrange(1, 7)
    prefixes = [rng.choice([0, rng.randrange(200), 64 * rng.randrange(4)]) for _ in range(requests)]
    lengths = [rng.choice([1, rng.randrange(1, 20), rng.randrange(129, 400)]) for _ in range(requests)]
    ranks, queries = rng.choice([2, 4, 5, 8]), rng.choice([2, 4, 8, 16])
    if sum(lengths) < ranks:
        return
    made = Pass(prefixes, lengths, rng.choice([PAGED, RAGGED, UNFUSED]), torch.float32)
    parts = on_ranks(ranks, lambda here: made.select(here, queries, rng.randrange(3)))
    assert torch.equal(whole(parts), made.select(ONE_RANK, queries))


@pytest.mark.parametrize("kind", [PAGED, RAGGED, UNFUSED])
@pytest.mark.parametrize(("ranks", "queries"), [(2, 4), (4, 16), (2, 16), (3, 4), (4, 4)])
@pytest.mark.parametrize("name", ["one", "a chunk that begins within a block", "mixed lengths"])
def test_queries_of_blocks_here_attend_together(kind: str, ranks: int, queries: int, name: str) -> None:
    """As each alone, where every block has as many on each rank, and more than one; else all are SGLang's alone."""
    torch.manual_seed(0)
    made = Pass(*PASSES[name], kind, torch.float32)
    pattern = Pattern.parse(f"FSF+2q{queries}")
    passes: list[Any] = [None] * ranks

    def run(here: Context) -> Tensor:
        batch = made.batch(here)
        found = made.call(here, queries, batch, padding=2)
        passes[here.rank] = batch
        return found

    for rank, table in enumerate(on_ranks(ranks, run)):
        batch, here = passes[rank], len(table) - 2
        batch.more, batch.lengths = {}, None
        ours, theirs = placed(pattern, ranks=ranks), Backend()
        found, wanted = attend(ours, batch, table, 2), attend(theirs, batch, table, 2)
        torch.testing.assert_close(found[:here], wanted[:here], rtol=1e-5, atol=1e-5)
        plan = blocks.plan_for(batch, 2)
        assert plan is not None
        alone = len(plan.first) - plan.blocks
        together = grouped.placed(ours) is not None
        assert together == (queries // ranks > 1 and queries % ranks == 0)
        assert ours.rows == ([alone] if together else [here + 2])
        assert plan.count == sum(made.lengths) and alone < here
        if together:
            assert (found[here:] == 0).all()
            assert torch.cat([plan.members, torch.arange(here)[plan.exact]]).sort().values.tolist() == list(range(here))


def on_gloo(rank: int, ranks: int) -> list[Tensor]:
    """What one of some processes selects in passes of all kinds, whose sizes differ."""
    here = Context(rank, ranks, dist.all_gather_into_tensor)
    patch = pytest.MonkeyPatch()
    put_modules(patch)
    found = []
    for seed, (prefixes, lengths) in enumerate(PASSES.values()):
        for kind in (PAGED, RAGGED, UNFUSED):
            torch.manual_seed(seed)
            found.append(Pass(prefixes, lengths, kind, torch.float32).select(here, 4, padding=rank))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_talk_by_gloo(ranks: int, tmp_path: Path) -> None:
    parts = on_two_ranks(on_gloo, tmp_path, ranks, ranks=ranks)
    wanted = []
    for seed, (prefixes, lengths) in enumerate(PASSES.values()):
        for kind in (PAGED, RAGGED, UNFUSED):
            torch.manual_seed(seed)
            wanted.append(Pass(prefixes, lengths, kind, torch.float32).select(ONE_RANK, 4))
    assert len(wanted) == 18
    for number, item in enumerate(wanted):
        assert torch.equal(whole([part[number] for part in parts]), item)


def test_rows_that_are_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """As of `--cp-strategy zigzag`, of another rank, or all of them: the first pass looks at their positions."""
    torch.manual_seed(0)
    made = Pass([64], [256], PAGED, torch.float32)
    here = Context(1, 2, lambda every, own: pytest.fail("ranks met"))
    segments = torch.cat([torch.arange(64, 128), torch.arange(128, 192)])
    for rows, line in ((segments, "has 128 rows on rank 1 of 2"), (torch.arange(0, 256, 2), "has 128 rows on rank 1")):
        metadata, kept = made.metadata.of_rank(1, 2)
        metadata.lengths = made.metadata.lengths[rows]
        indexer = blocks.BlockSelection(SglangIndexer(made.keys[kept]), 4, ranks=here)
        with pytest.raises(SystemExit):
            indexer(False, made.batch(here), 0, made.q[rows], made.w[rows], metadata)
        assert line in capsys.readouterr().err
    indexer = blocks.BlockSelection(SglangIndexer(made.keys), 4, ranks=here)
    with pytest.raises(SystemExit):
        indexer(False, made.batch(here), 0, made.q, made.w, made.metadata)
    assert "SGLang has 256 rows on rank 1 of 2 of context parallelism, expected 128" in capsys.readouterr().err


def test_passes_that_sglang_does_not_share_out_are_those_of_one_rank() -> None:
    """Fewer tokens than ranks, and what is no prompt: nobody meets."""
    torch.manual_seed(0)
    made = Pass([0], [300], PAGED, torch.float32)
    here = Context(1, 2, lambda every, own: pytest.fail("ranks met"))
    indexer = blocks.BlockSelection(SglangIndexer(made.keys), 4, ranks=here)
    found = indexer(False, made.batch(ONE_RANK), 0, made.q, made.w, made.metadata)
    assert torch.equal(found, made.select(ONE_RANK, 4))


def test_no_plan_outlives_its_pass() -> None:
    """SGLang may use the object of a pass again, as where it replays graphs of prompts."""
    torch.manual_seed(0)
    first, second = Pass([64], [256], PAGED, torch.float32), Pass([0], [320], PAGED, torch.float32)

    def run(here: Context) -> Tensor:
        batch = first.batch(here)
        first.call(here, 4, batch)
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = second.prefixes, second.lengths
        return second.call(here, 4, batch)

    assert torch.equal(whole(on_ranks(2, run)), second.select(ONE_RANK, 4))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    FAULTS[plant.__name__] = plant
    return plant


@fault
def share_left_out(patch: pytest.MonkeyPatch) -> None:
    every = Context.every

    def left_out(here: Context, own: Tensor, count: int) -> Tensor:
        chosen = own.dtype == torch.int32 and here.rank == 1
        return every(here, torch.zeros_like(own) if chosen else own, count)

    patch.setattr(Context, "every", left_out)


@fault
def leaders_of_another_block(patch: pytest.MonkeyPatch) -> None:
    mean = blocks.mean_queries
    patch.setattr(blocks, "mean_queries", lambda q, w, *row, ranks: mean(q.roll(4, 0), w.roll(4, 0), *row, ranks=ranks))


@fault
def queries_of_this_rank_alone(patch: pytest.MonkeyPatch) -> None:
    def own(here: Context, q: Tensor, w: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return q.repeat(here.ranks, 1, 1), w.repeat(here.ranks, 1, 1)

    patch.setattr(Context, "queries", own)


@fault
def places_of_another_rank(patch: pytest.MonkeyPatch) -> None:
    expand = blocks.expand_blocks
    patch.setattr(
        blocks, "expand_blocks", lambda *given, rank, ranks: expand(*given, rank=ranks - 1 - rank, ranks=ranks)
    )


@fault
def a_stale_plan(patch: pytest.MonkeyPatch) -> None:
    def stale(selection: Any, prefill: Any) -> blocks.WholePlan:
        blocks_before = [blocks.Run(64, 64, 0, 16)]
        return blocks.WholePlan.of(blocks_before, [300], 4, torch.device("cpu"), prefill.context)

    patch.setattr(blocks.BlockSelection, "_plan", stale)


@pytest.mark.parametrize("name", ["", *FAULTS])
def test_the_comparison_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = Pass([0], [300], PAGED, torch.float32)
    wanted = made.select(ONE_RANK, 4)
    if name:
        FAULTS[name](monkeypatch)
    parts = on_ranks(2, lambda here: made.call(here, 4, made.batch(here)))
    assert torch.equal(whole(parts), wanted) == (not name)


class Adapter(BlocksAdapter):
    """Of a model that is its attention modules by layer, the indexers of which are all there is to load."""

    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        return iter(model.items())

    def role(self, site: int, module: Any) -> str:
        return "F"


@pytest.mark.parametrize(
    ("arguments", "placed_over", "line"),
    [
        ({"attn_cp_size": 2}, 2, None),
        ({"attn_cp_size": 2}, 1, "over {} (layers: ranks of a context), expected {2: 2}"),
        ({"attn_cp_size": 4}, 2, "over {2: 2} (layers: ranks of a context), expected {2: 4}"),
        ({}, 2, "over {2: 2} (layers: ranks of a context), expected {}"),
        ({}, 1, None),
    ],
)
def test_what_is_proven(arguments: dict[str, Any], placed_over: int, line: str | None) -> None:
    """The ranks that were placed are those of SGLang's arguments; the status says both numbers."""
    pattern, model = Pattern.parse("FFF+2q4"), {}
    for layer in range(3):
        model[layer] = SimpleNamespace(indexer=SglangIndexer(torch.zeros(1, DIM)))
        model[layer].indexer.named_parameters = dict
    patch_indexers.install(model.items(), pattern, Context(0, placed_over, print))
    given = {"enable_prefill_cp": True, "cp_strategy": "interleave", **arguments} if arguments else {}
    runner = SimpleNamespace(model=model, server_args=SimpleNamespace(**given))
    family = SimpleNamespace(sglang=Adapter(DSA.sglang.serving))
    asked = SimpleNamespace(shard=False, unions=False)
    plan: Any = SimpleNamespace(pattern=pattern, family=family, asked=asked, index_topk=TOPK, weights_sha256="")
    report = proof.look_at(plan, runner)
    assert report.problem == (None if line is None else f"blocks would be selected {line}")
    if line is None:
        holder = ProofHolder()
        holder.set(Proof(pattern, 3, placed_over, contexts=report.contexts))
        said = {key: value for key, value in holder.status("x").items() if "context" in key}
        assert said == ({"context_layers": 1, "context_ranks": 2} if placed_over == 2 else {})


CONTEXT = "--enable-prefill-cp --cp-strategy interleave --attn-cp-size 2"


@pytest.mark.parametrize(
    ("line", "shard", "refused"),
    [
        (CONTEXT, False, {}),
        (f"{CONTEXT} --attn-dp-size 2 --tp 4", False, {}),
        ("--enable-prefill-cp --cp-strategy zigzag --attn-cp-size 2", False, {"--enable-prefill-cp", "--attn-cp-size"}),
        ("--enable-prefill-cp --cp-strategy interleave", False, {"--enable-prefill-cp"}),
        ("--attn-cp-size 2", False, {"--attn-cp-size"}),
        (f"{CONTEXT} --enable-dsa-cache-layer-split", False, {"--enable-dsa-cache-layer-split"}),
        (CONTEXT, True, {"--enable-prefill-cp", "--attn-cp-size"}),
    ],
)
def test_what_is_refused(line: str, shard: bool, refused: set[str]) -> None:
    found = dict(refusals_of(Pattern.parse("FSF+2q4"), DSA, on_cpu(line), shard))
    assert set(found) == set(refused)
    reason = (
        "it shares out the rows of prompts already" if shard else "expected --enable-prefill-cp --cp-strategy interl"
    )
    assert all(reason in why or "layer-split" in why for why in found.values())
