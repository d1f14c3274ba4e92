"""Attention of blocks together is that of each query alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.grouped_attention import grouped_attention, naive
from tests.kernels.interpreter import DEVICE, KERNELS, LARGE, poisoned

__all__ = ["poisoned"]
assert KERNELS
DIM, V_DIM = 128, 64


def inputs(blocks: int, queries: int, heads: int, topk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks over 200 keys: the first has fewer keys than a selection, the last none but its own tokens."""
    torch.manual_seed(queries + heads)
    q = torch.randn(blocks * queries, heads, DIM, device=DEVICE).to(dtype)
    kv = torch.randn(200 + blocks * queries, DIM, device=DEVICE).to(dtype)
    table = torch.empty(blocks * queries, topk, dtype=torch.int32, device=DEVICE)
    for block in range(blocks):
        best = torch.randperm(200, device=DEVICE)[: topk - queries].int()
        if block == 0:
            best[len(best) // 2 :] = -1
        if block == blocks - 1:
            best[:] = -1
        for query in range(queries):
            own = 200 + block * queries + torch.arange(queries, device=DEVICE)
            own[query + 1 :] = -1
            table[block * queries + query] = torch.cat([best, own.int()])
    return q, kv, table


def alone(q: Tensor, kv: Tensor, table: Tensor, scale: float) -> Tensor:
    """Each query for itself, in float64."""
    found = kv.double()[table.long().clamp_min(0)]
    scores = torch.einsum("thd,tkd->thk", q.double(), found) * scale
    weights = scores.masked_fill((table < 0)[:, None], -math.inf).softmax(2)
    return weights @ found[..., :V_DIM]


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "heads", "topk"),
    [(2, 8, 16), (4, 8, 40), (16, 8, 64), (4, 4, 4), (5, 16, 33), pytest.param(32, 16, 100, marks=LARGE)],
)
def test_it_is_the_attention_of_each_query(
    backend: Any, dtype: torch.dtype, queries: int, heads: int, topk: int
) -> None:
    q, kv, table = inputs(3, queries, heads, topk, dtype)
    out = q.new_empty(*q.shape[:2], V_DIM)
    given = {"queries": queries, "scale": DIM**-0.5, "v_dim": V_DIM, "out": out, "backend": backend}
    found = grouped_attention(q, kv, table, **given)
    assert found is out
    error = (found.double() - alone(q, kv, table, DIM**-0.5)).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize(("queries", "ranks"), [(4, 2), (16, 4), (6, 3)])
def test_a_rank_may_have_some_queries_of_each_block(backend: Any, queries: int, ranks: int) -> None:
    """Every n-th of the pass, which begins anywhere within a block; tokens that nobody here sees are no keys."""
    q, kv, table = inputs(3, queries, 8, 40, torch.float32)
    for rank in range(ranks):
        rows, keys = q[rank::ranks].contiguous(), table[rank::ranks]
        out = rows.new_empty(*rows.shape[:2], V_DIM)
        given = {"queries": queries // ranks, "own": queries, "scale": 0.1, "v_dim": V_DIM, "out": out}
        within = torch.arange(rank, queries, ranks, dtype=torch.int32, device=DEVICE) + 1
        for seen in (None, within.repeat(3)):
            found = grouped_attention(rows, kv, keys, **given, seen=seen, backend=backend)
            assert (found.double() - alone(rows, kv, keys, 0.1)).abs().max() < 1e-5


@pytest.mark.parametrize("seed", range(20))
def test_keys_may_be_split_anywhere(seed: int) -> None:
    """A part of the keys, and the rest added by denominators, is all of them: also where one part has none."""
    generator = torch.Generator().manual_seed(seed)
    q, kv = (torch.randn(size, DIM, generator=generator, device="cpu") for size in (4, 60))
    keys = torch.randperm(60, generator=generator)[None, :40].int()
    cut = int(torch.randint(0, 41, (), generator=generator))
    whole, total = naive.attend(q[None], kv, keys, 0.1, 40, V_DIM)
    parts = [naive.attend(q[None], kv, part, 0.1, part.shape[1], V_DIM) for part in keys.split([cut, 40 - cut], 1)]
    (first, a), (second, b) = parts
    both = torch.logaddexp2(a, b)
    merged = (a - both).exp2()[..., None] * first + (b - both).exp2()[..., None] * second
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both, total)


def test_rows_of_padding_in_the_shared_part_are_left_out() -> None:
    """FlashMLA works on 64 rows at a time; what it gives for more rows than there are is not looked at."""
    q, kv, table = inputs(2, 2, 8, 16, torch.float32)

    def padded(*given: Any) -> tuple[Tensor, Tensor]:
        out, lse = naive.attend(*given)
        rows = torch.nn.functional.pad(out, (0, 0, 0, 5), value=math.nan)
        return rows, torch.nn.functional.pad(lse, (0, 5), value=math.nan)

    for backend in ("naive", "triton"):
        out = q.new_empty(*q.shape[:2], V_DIM)
        found = grouped_attention(
            q, kv, table, queries=2, scale=0.1, v_dim=V_DIM, out=out, attend=padded, backend=backend
        )
        assert (found.double() - alone(q, kv, table, 0.1)).abs().max() < 1e-5


def test_what_does_not_fit_is_refused() -> None:
    q, kv, table = inputs(2, 2, 8, 16, torch.float32)
    out = q.new_empty(*q.shape[:2], V_DIM)
    good = {"queries": 2, "scale": 1.0, "v_dim": V_DIM, "out": out}
    for arguments, changes, line in (
        ((q[:3], kv, table[:3]), {}, "expected blocks of 2 queries"),
        ((q, kv, table), {"queries": 32}, "expected blocks of 32 queries"),
        ((q, kv, table[:2]), {}, "expected blocks of 2 queries"),
        ((q, kv, table), {"own": 1}, "expected blocks of 2 queries"),
        ((q, kv, table), {"own": 17}, "expected blocks of 2 queries"),
        ((q, kv[:, :32], table), {}, r"kv is \[204, 32\]"),
        ((q, kv, table), {"v_dim": 32}, "out"),
        ((q, kv, table.mT.contiguous().mT), {}, "are not contiguous"),
        ((q, kv, table), {"backend": "cpu"}, "backend is cpu"),
    ):
        with pytest.raises(KernelInputError, match=line):
            grouped_attention(*arguments, **{**good, **changes})
    with pytest.raises(KernelInputError, match="multiples of 64"):
        grouped_attention(q[..., :96].contiguous(), kv[:, :96].contiguous(), table, **{**good, "backend": "triton"})
