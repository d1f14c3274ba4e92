"""Attention of blocks together on SGLang's backend, without SGLang: what it takes over, and what it leaves alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_kernels.grouped_attention import naive
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.dsa.blocks import grouped
from sglang_indexcache.families.dsa.blocks import selection as blocks
from sglang_indexcache.families.hy_v4 import HY_V4
from sglang_indexcache.io.errors import ProofError
from tests.served import DIM, HEADS, PAGED, RAGGED, TOPK, UNFUSED, Metadata, SglangIndexer, sglang_modules

__all__ = ["sglang_modules"]
pytestmark = pytest.mark.usefixtures("sglang_modules")

KV_DIM, V_DIM, SCALE = 24, 16, 0.3
PATTERN = Pattern.parse("FSFFS+2q4")


class Backend:
    """A `DeepseekSparseAttnBackend`, whose kernel attends from each query alone."""

    dsa_prefill_impl = "flashmla_sparse"
    device = "cpu"

    def __init__(self) -> None:
        self.rows: list[int] = []  # of each call of the kernel

    def forward_extend(self, q: Tensor, k: Tensor, layer: Any, forward_batch: Any, topk_indices: Tensor) -> Tensor:
        return self._forward_flashmla_sparse(
            q_all=q,
            kv_cache=k,
            v_head_dim=V_DIM,
            page_table_1=topk_indices,
            sm_scale=SCALE,
            topk_length=forward_batch.lengths,
            **forward_batch.more,
        )

    def _forward_flashmla_sparse(
        self,
        q_all: Tensor,
        kv_cache: Tensor,
        v_head_dim: int,
        page_table_1: Tensor,
        sm_scale: float,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> Tensor:
        self.rows.append(len(q_all))
        assert topk_length is None or len(topk_length) == len(q_all)
        found = kv_cache[page_table_1.long().clamp_min(0), 0]
        scores = torch.einsum("thd,tkd->thk", q_all, found) * sm_scale
        weights = scores.masked_fill((page_table_1 < 0)[:, None], -math.inf).softmax(2)
        return weights.nan_to_num(0.0) @ found[..., :v_head_dim]


def grouped_layers(backend: Any) -> tuple[int, ...]:
    found = grouped.placed(backend)
    return () if found is None else tuple(sorted(found.selecting))


def placed(pattern: Pattern = PATTERN, heads: int = 4, ranks: int = 1, **changes: Any) -> Backend:
    backend = Backend()
    vars(backend).update(changes)
    grouped.place(backend, pattern, dict.fromkeys(range(len(pattern)), heads), ranks)
    return backend


def select(
    prefixes: list[int], lengths: list[int], kind: str, queries: int = 4, padding: int = 0, layer: int = 2
) -> tuple[Any, Tensor]:
    """A forward pass, and what a layer in blocks selects in it."""
    keys, metadata = torch.randn(sum(prefixes) + sum(lengths), DIM), Metadata(prefixes, lengths, kind)
    q, w = torch.randn(sum(lengths) + padding, HEADS, DIM), torch.rand(sum(lengths) + padding, HEADS, 1)
    batch = SimpleNamespace(extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=lengths, more={})
    batch.lengths = metadata.lengths.clamp_max(TOPK)
    return batch, blocks.BlockSelection(SglangIndexer(keys), queries)(False, batch, layer, q, w, metadata)


def attend(backend: Any, batch: Any, table: Tensor, layer: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(table), 4, KV_DIM, generator=generator)
    kv = torch.randn(int(table.max()) + 1, 1, KV_DIM, generator=generator)
    return backend.forward_extend(q, kv, SimpleNamespace(layer_id=layer), forward_batch=batch, topk_indices=table)


@pytest.mark.parametrize("kind", [PAGED, RAGGED, UNFUSED])
@pytest.mark.parametrize(("prefixes", "lengths"), [([0], [300]), ([70], [260]), ([0, 70, 128], [200, 300, 1])])
@pytest.mark.parametrize("queries", [4, TOPK])
def test_it_is_the_attention_of_each_query(kind: str, prefixes: list[int], lengths: list[int], queries: int) -> None:
    """Of layers in blocks and of S layers above them, one request or several; the kernel has the other rows alone."""
    torch.manual_seed(0)
    pattern = Pattern.parse(f"FSFFSF+3q{queries}")
    batch, table = select(prefixes, lengths, kind, queries, layer=3)
    ours, theirs = placed(pattern), Backend()
    plan = blocks.plan_for(batch, 3)
    assert plan is not None and (plan.begin is None) == (len(lengths) > 1)
    for layer in (3, 4):
        wanted = attend(theirs, batch, table, layer, layer)
        torch.testing.assert_close(attend(ours, batch, table, layer, layer), wanted, rtol=1e-5, atol=1e-5)
    assert ours.rows == [len(plan.exact)] * 2 and theirs.rows == [sum(lengths)] * 2


def test_layers_that_select_for_each_query_are_sglangs_alone() -> None:
    """Also where the layer that selects in blocks did not in this pass, or is on another pipeline stage."""
    torch.manual_seed(0)
    batch, table = select([0], [300], UNFUSED)
    ours = placed()
    for layer in (0, 1, 3, 4):
        assert torch.equal(attend(ours, batch, table, layer), attend(Backend(), batch, table, layer))
    short = SimpleNamespace(lengths=batch.lengths, more={})
    assert torch.equal(attend(ours, short, table, 2), attend(Backend(), short, table, 2))
    other, _ = select([0], [300], UNFUSED, layer=5)  # a plan that another layer has selected with
    assert torch.equal(attend(ours, other, table, 2), attend(Backend(), other, table, 2))
    batch.more = {"attn_sink": torch.zeros(4)}
    assert torch.equal(attend(ours, batch, table, 2), attend(Backend(), batch, table, 2))
    assert ours.rows == [300] * 7


def test_rows_of_padding() -> None:
    """Data-parallel attention pads the pass: lengths that don't fit the rows are left out, as SGLang does."""
    torch.manual_seed(0)
    batch, table = select([0], [300], UNFUSED, padding=7)
    batch.lengths = None
    found, wanted = attend(placed(), batch, table, 2), attend(Backend(), batch, table, 2)
    torch.testing.assert_close(found[:300], wanted[:300])
    assert (found[300:] == 0).all()
    batch.lengths = torch.ones(307, dtype=torch.int32)
    assert attend(placed(), batch, table, 2).isfinite().all()


def test_where_it_stands() -> None:
    """Layers on this rank, with heads that SGLang pads, and kernels that were read; read back from the backend."""
    assert grouped.selecting_in_blocks(Pattern.parse("FSFSSF+0q4+2q8")) == {0: 0, 1: 0, 2: 2, 3: 2, 4: 2}
    for backend, layers in (
        (placed(Pattern.parse("FSFSSF+0q4+2q8")), (0, 1, 2, 3, 4)),
        (placed(Pattern.parse("FSFSSF+0q4+2q8"), ranks=4), (2, 3, 4)),
        (placed(Pattern.parse("FSFSSF+0q4+2q8"), ranks=3), ()),
        (placed(heads=64), ()),
        (placed(heads=128), ()),
        (placed(heads=48), ()),
        (placed(Pattern("FSFFS")), ()),
        (placed(dsa_prefill_impl="flashmla_sparse_q8"), ()),
        (placed(dsa_prefill_impl="flashmla_kv"), ()),
        (placed(dsa_prefill_impl="triton_sparse_mla"), (2,)),
    ):
        assert grouped_layers(backend) == layers
    backend = Backend()
    grouped.place(backend, Pattern.parse("FSFFSS+2q4+3q4"), {4: 8, 5: 8})  # a pipeline stage: indices come from below
    assert grouped_layers(backend) == (4, 5)
    once = vars(backend)["forward_extend"]
    grouped.place(backend, PATTERN, {2: 8})
    assert vars(backend)["forward_extend"] is once
    backend._forward_flashmla_sparse = print  # type: ignore[assignment]
    with pytest.raises(ProofError, match="something has replaced the attention of blocks"):
        grouped.placed(backend)


def test_blocks_of_hy_v4_are_attended_from_one_by_one() -> None:
    """A layer's sinks are a part of each query's softmax, and `/server_info` must not name it as grouped."""
    backend = Backend()
    modules = [SimpleNamespace(skip_topk=False, next_skip_topk=False, layer_id=2, num_local_heads=4)]
    runner = SimpleNamespace(
        attn_backend=backend,
        model=SimpleNamespace(modules=lambda: modules),
        server_args=SimpleNamespace(),
        kv_cache_dtype=torch.float32,
    )
    assert HY_V4.sglang.group(runner, PATTERN) is None and "forward_extend" not in vars(backend)
    found = DSA.sglang.group(runner, PATTERN)
    assert found is not None and grouped_layers(backend) == (2,)
    runner.attn_backend = SimpleNamespace(prefill_backend=backend)
    assert DSA.sglang.group(runner, PATTERN) is found  # captured again


def test_errors_of_ours_end_the_process_and_sglangs_pass(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    batch, table = select([0], [300], UNFUSED)
    backend = placed()
    with pytest.raises(SystemExit) as end:
        attend(backend, batch, table[:, :3].contiguous(), 2)
    assert end.value.code == 2 and "expected blocks of 4 queries" in capsys.readouterr().err
    with pytest.raises(RuntimeError):  # SGLang's kernel, with keys that are not there
        attend(backend, batch, table[:, None], 0)


class Kernel:
    """FlashMLA's: 64 or 128 heads, an output row for each; `base` of its logarithms."""

    def __init__(self, base: float = 2.0) -> None:
        self.base, self.heads = base, list[int]()

    def __call__(
        self, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, topk_length: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert q.is_contiguous() and q.shape[1] in (64, 128) and len(q) == len(indices) == len(topk_length)
        self.heads.append(q.shape[1])
        out, lse = naive.attend(q, kv[:, 0], indices[:, 0], sm_scale, int(topk_length[0]), d_v)
        return out.to(q.dtype), lse, lse * math.log(2) / math.log(self.base)


@pytest.mark.parametrize(
    ("rows", "heads"), [(32, 64), (64, 64), (96, 128), (128, 128), (192, 64), (256, 128), (512, 128)]
)
def test_flash_mla_takes_any_number_of_rows(rows: int, heads: int) -> None:
    torch.manual_seed(rows)
    kernel = Kernel()
    q, kv, keys = torch.randn(3, rows, KV_DIM), torch.randn(50, KV_DIM), torch.randint(0, 50, (3, 20)).int()
    attention = grouped.FlashMLA(kernel)
    for count in (11, 20):
        out, lse = attention(q, kv, keys, SCALE, count, V_DIM)
        wanted, wanted_lse = naive.attend(q, kv, keys, SCALE, count, V_DIM)
        torch.testing.assert_close(out[:, :rows], wanted)
        torch.testing.assert_close(lse[:, :rows], wanted_lse)
    assert set(kernel.heads) == {heads}


def test_a_flash_mla_of_another_version_is_refused() -> None:
    """The current kernel of upstream gives natural logarithms."""
    grouped._check(grouped.FlashMLA(Kernel()), torch.device("cpu"))
    with pytest.raises(ProofError, match="expected --indexcache-no-grouping"):
        grouped._check(grouped.FlashMLA(Kernel(math.e)), torch.device("cpu"))
