"""Attention over unions of selections is that of each query alone: unions, products, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_kernels import KernelInputError
from indexcache_lab.kernels.union_attention import Unions, union_attention, unite
from tests.kernels.interpreter import DEVICE, KERNELS, LARGE, poisoned

__all__ = ["poisoned"]
CACHE, V_DIM, DIM = 700, 64, 80
BACKENDS = ("naive", "triton")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def selections(tokens: int, topk: int, cache: int = CACHE, seed: int = 0) -> Tensor:
    """Each query keeps most of the last one's keys; the last query but one has none."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.empty(tokens, topk, dtype=torch.int32)
    row = torch.randperm(cache, generator=generator)[:topk]
    for token in range(tokens):
        fresh = torch.randperm(cache, generator=generator)
        kept = row[torch.randperm(len(row), generator=generator)[: topk * 3 // 4]]
        row = torch.cat([kept, fresh[~torch.isin(fresh, kept)][: topk - len(kept)]])
        table[token] = torch.nn.functional.pad(row, (0, topk - len(row)), value=-1)
    if tokens > 1:
        table[-2] = -1
    return table.to(DEVICE)


def alone(q: Tensor, kv: Tensor, table: Tensor, scale: float, v_dim: int = V_DIM) -> Tensor:
    """Each query for itself in float64, over the set of its keys."""
    out = torch.zeros(*q.shape[:2], v_dim, dtype=torch.float64, device=q.device)
    for token, row in enumerate(table.tolist()):
        keys = sorted({key for key in row if 0 <= key < len(kv)})
        if keys:
            found = kv[keys].double()
            out[token] = (q[token].double() @ found.T * scale).softmax(1) @ found[:, :v_dim]
    return out


def inputs(tokens: int, heads: int, dtype: torch.dtype, dim: int = DIM, cache: int = CACHE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads)
    q, kv = (torch.randn(size, generator=generator) for size in ((tokens, heads, dim), (cache, dim)))
    return q.to(DEVICE, dtype), kv.to(DEVICE, dtype)


def attended(q: Tensor, kv: Tensor, table: Tensor, queries: int, backend: Any, v_dim: int = V_DIM) -> Tensor:
    unions = unite(table, queries=queries, cache=len(kv), backend=backend)
    out = q.new_empty(*q.shape[:2], v_dim)
    assert union_attention(q, kv, unions, scale=0.1, v_dim=v_dim, out=out, backend=backend) is out
    return out


def check(q: Tensor, kv: Tensor, table: Tensor, queries: int, backend: Any, v_dim: int = V_DIM) -> None:
    error = (attended(q, kv, table, queries, backend, v_dim).double() - alone(q, kv, table, 0.1, v_dim)).abs().max()
    assert error < TOLERANCE[q.dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "queries", "tokens", "topk"),
    [(8, 8, 19, 64), (8, 4, 8, 33), (16, 4, 5, 64), (32, 2, 3, 64), (4, 2, 7, 1), (3, 8, 9, 40), (8, 8, 1, 64)],
)
def test_it_is_the_attention_of_each_query(
    backend: Any, dtype: torch.dtype, heads: int, queries: int, tokens: int, topk: int
) -> None:
    check(*inputs(tokens, heads, dtype), selections(tokens, topk), queries, backend)


@pytest.mark.parametrize(
    ("heads", "queries"), [(8, 8), pytest.param(16, 4, marks=LARGE), pytest.param(32, 2, marks=LARGE)]
)
def test_sizes_of_glm_5(heads: int, queries: int) -> None:
    q, kv = inputs(queries + 1, heads, torch.bfloat16, 576, 6000)
    check(q, kv, selections(queries + 1, 2048, 6000), queries, "triton", 512)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_in_common_is_no_overflow(backend: Any) -> None:
    q, kv = inputs(8, 8, torch.float32)
    table = torch.randperm(512, generator=torch.Generator().manual_seed(1)).int().view(8, 64).to(DEVICE)
    assert unite(table, queries=8, cache=CACHE, backend=backend).counts.tolist() == [512]
    check(q, kv, table, 8, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_duplicates_and_rows_that_do_not_exist(backend: Any) -> None:
    """A key twice is one, and no index reaches beside the cache: not -1, nor others below 0, nor its size and above."""
    q, kv = inputs(6, 8, torch.float32)
    table = selections(6, 64)
    table[0, 20:] = -1
    table[1, :30] = table[1, 30].item()
    table[2, ::3], table[2, 1::3] = -(2**31), 2**31 - 1
    table[3, 5], table[3, 6] = CACHE, CACHE - 1
    whole = torch.full((CACHE + 9000, DIM), math.nan, device=DEVICE)  # what is beside the cache is no number
    whole[4500 : 4500 + CACHE] = kv
    check(q, whole[4500 : 4500 + CACHE], table, 4, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_nobody_selected_may_be_anything(backend: Any) -> None:
    """Also the first one, which SGLang never writes."""
    q, kv = inputs(9, 8, torch.float32)
    table = selections(9, 33)
    table[table == 0] = 1
    unused = torch.ones(CACHE, dtype=torch.bool, device=DEVICE)
    unused[table[table >= 0].long()] = False
    assert unused[0] and unused.sum() > 100
    kv[unused] = math.nan
    check(q, kv, table, 8, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [2, 8])
def test_no_keys_at_all(backend: Any, queries: int) -> None:
    q, kv = inputs(5, 8, torch.float32)
    nothing = torch.full((5, 16), -1, dtype=torch.int32, device=DEVICE)
    for table in (nothing, nothing[:, :0]):
        assert not attended(q, kv, table, queries, backend).any()
    assert not attended(q, kv[:0], nothing, queries, backend).any()
    assert attended(q[:0], kv, nothing[:0], queries, backend).shape == (0, 8, V_DIM)


def owners_of(unions: Unions) -> list[dict[int, int]]:
    """Keys with owners of each block."""
    return [
        dict(zip(unions.keys[block, :count].tolist(), unions.owners[block, :count].tolist(), strict=True))
        for block, count in enumerate(unions.counts.tolist())
    ]


@pytest.mark.parametrize("seed", range(6))
def test_unions_are_those_of_the_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With programs of several blocks, whose marks must be gone; tables may be parts of wider ones."""
    from indexcache_lab.kernels.union_attention import union

    monkeypatch.setattr(union, "_MARKS", 3 * 768)
    monkeypatch.setattr(union, "_PIECE", 128)
    table = selections(45, 70, seed=seed)[:, :64]
    found = union.unite(table, 8, CACHE)
    wanted = unite(table, queries=8, cache=CACHE, backend="naive")
    assert found.counts.tolist() == wanted.counts.tolist()
    assert owners_of(found) == owners_of(wanted)
    for block, count in enumerate(found.counts.tolist()):
        end = -(-count // 64) * 64
        assert found.keys[block, :end].tolist() == wanted.keys[block, :end].tolist()
        assert not found.owners[block, count:end].any()


def test_wide_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 64 bits, as of caches with 2**31 numbers and more, which no test can have."""
    q, kv = inputs(9, 8, torch.float32)
    monkeypatch.setattr(KERNELS["union_attention"], "_WIDE", 0)
    check(q, kv, selections(9, 64), 8, "triton")


def test_what_does_not_fit_is_refused() -> None:
    q, kv = inputs(8, 8, torch.float32)
    table, out = selections(8, 16), q.new_empty(8, 8, V_DIM)
    for bad, queries, line in (
        (table.long(), 8, "expected .T, K. of torch.int32"),
        (table[0], 8, "expected .T, K. of torch.int32"),
        (table.T.contiguous().T, 8, "contiguous in columns"),
        (table, 3, "blocks of 3 queries"),
        (table, 16, "blocks of 16 queries"),
    ):
        with pytest.raises(KernelInputError, match=line):
            unite(bad, queries=queries, cache=CACHE)
    unions = unite(table, queries=8, cache=CACHE, backend="naive")
    good: dict[str, Any] = {"q": q, "kv": kv, "unions": unions, "scale": 1.0, "v_dim": V_DIM, "out": out}
    for changes, line in (
        ({"q": q[:7]}, "unions are of 8 queries"),
        ({"q": torch.cat([q, q], 1)}, "blocks of 64 queries x heads"),
        ({"q": q.half(), "kv": kv.half(), "out": out.half()}, "float32 or bfloat16"),
        ({"kv": kv.bfloat16()}, "float32 or bfloat16 of all"),
        ({"kv": kv[:-1]}, "expected .700 at least, 80."),
        ({"kv": kv[:, :64].contiguous()}, "expected .700 at least, 80."),
        ({"v_dim": 81}, "81 dimensions"),
        ({"v_dim": 32}, "out is"),
        ({"q": q.mT.contiguous().mT}, "not contiguous"),
        ({"out": out.to("meta")}, "expected one device"),
        ({"backend": "cpu"}, "backend is cpu"),
        ({"backend": "triton", "v_dim": 48, "out": out[..., :48].contiguous()}, "powers of two"),
    ):
        with pytest.raises(KernelInputError, match=line):
            union_attention(**{**good, **changes})
