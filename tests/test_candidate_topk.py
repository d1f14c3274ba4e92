"""The best of each query's candidates: Triton against the definition; under its interpreter without a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_kernels import KernelInputError, candidate_topk, causal_ranges, indexer_topk
from indexcache_kernels.candidate_topk import Pages
from indexcache_kernels.indexer_topk.naive import indexer_scores
from tests.interpreter import DEVICE, INTERPRETED, KERNELS, poisoned

__all__ = ["poisoned"]  # a fixture of every test here


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def inputs(
    queries: int, keys: int, most: int, heads: int = 4, dim: int = 32, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Random vectors, and for each query 0 to `most` candidates, ascending."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        "q": torch.randn(queries, heads, dim, generator=generator).to(dtype),
        "k": torch.randn(keys, dim, generator=generator).to(dtype),
        "weights": torch.randn(queries, heads, generator=generator),
    }
    if dtype == torch.float8_e4m3fn:
        found["k_scale"] = torch.randn(keys, generator=generator).exp()
    order = torch.rand(queries, keys, generator=generator).argsort(1)[:, :most]
    counts = torch.randint(0, most + 1, (queries, 1), generator=generator)
    counts[0], counts[-1] = most, 0
    chosen = order.masked_fill(torch.arange(order.shape[1]) >= counts, keys).sort(1).values
    found["candidates"] = torch.nn.functional.pad(chosen, (0, most - chosen.shape[1]), value=keys).int()
    found["candidates"][found["candidates"] == keys] = -1
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


def check(found: Tensor, given: dict[str, Any], topk: int) -> None:
    """As many as there can be, ascending, candidates all, and none left out scores higher but for rounding, which in
    float8 is that of tensor cores that add with fewer bits."""
    rounding = 1e-3 if given["q"].dtype == torch.float8_e4m3fn and not INTERPRETED else 1e-5
    scale = given.get("k_scale")
    scores = indexer_scores(given["q"].double(), given["k"].double(), given["weights"].double(), scale)
    assert found.dtype == torch.int32 and found.shape == (len(scores), topk)
    for row, chosen, candidates in zip(scores, found.tolist(), given["candidates"].tolist(), strict=True):
        known = [token for token in candidates if token >= 0]
        kept = [token for token in chosen if token >= 0]
        assert chosen == kept + [-1] * (topk - len(kept)) and kept == sorted(set(kept))
        assert len(kept) == min(topk, len(known)) and set(kept) <= set(known)
        others = sorted(set(known) - set(kept))
        if kept and others:
            assert row[others].max() <= row[kept].min() + rounding * row.abs().max()


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "most", "heads", "dim", "topk"),
    [(2, 5, 3, 1, 16, 4), (7, 300, 256, 32, 128, 64), (5, 200, 130, 3, 24, 130), (3, 90, 70, 64, 32, 100)],
)
def test_the_best_candidates(
    backend: Any, dtype: torch.dtype, queries: int, keys: int, most: int, heads: int, dim: int, topk: int
) -> None:
    given = inputs(queries, keys, most, heads, dim, dtype)
    check(candidate_topk(**given, topk=topk, backend=backend), given, topk)


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_of_equal_scores_the_first(backend: Any) -> None:
    """Exactly: small integers, many of them equal, and zeros of both signs."""
    given = {
        name: tensor.round() if tensor.is_floating_point() else tensor for name, tensor in inputs(9, 150, 120).items()
    }
    given["weights"][3] = 0
    given["weights"][4] *= -1
    found = candidate_topk(**given, topk=20, backend=backend)
    scores = indexer_scores(given["q"], given["k"], given["weights"])
    for row, chosen, candidates in zip(scores.tolist(), found.tolist(), given["candidates"].tolist(), strict=True):
        ranked = sorted((-row[token], token) for token in candidates if token >= 0)[:20]
        assert [token for token in chosen if token >= 0] == sorted(token for _, token in ranked)


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_all_keys_are_the_full_selection(backend: Any) -> None:
    """Where everything that a query sees is a candidate, it is what `indexer_topk` takes; 1 x topk stays as it is."""
    given = inputs(70, 70, 70, dtype=torch.bfloat16)
    starts, ends = causal_ranges(torch.tensor([0, 30, 70], dtype=torch.int32, device=DEVICE))
    full = {**{name: given[name] for name in ("q", "k", "weights")}, "starts": starts, "ends": ends}
    everything = indexer_topk(**full, topk=70, backend=backend)
    expected = indexer_topk(**full, topk=16, backend=backend)
    given["candidates"] = everything
    assert torch.equal(candidate_topk(**given, topk=16, backend=backend), expected)
    given["candidates"] = expected
    assert torch.equal(candidate_topk(**given, topk=16, backend=backend), expected)


@pytest.mark.parametrize("rows", [3, 64])
def test_parts_of_rows_and_of_candidates(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that are computed some at a time, and whose candidates are split, are what they are at once."""
    given = inputs(10, 400, 300)
    expected = candidate_topk(**given, topk=32, backend="triton")
    monkeypatch.setattr(KERNELS["candidate_topk"], "ROWS", rows)
    monkeypatch.setattr(KERNELS["candidate_topk"], "BLOCK_N", dict.fromkeys((1, 2, 4), 16))
    assert torch.equal(candidate_topk(**given, topk=32, backend="triton"), expected)
    one = {name: tensor[:1] if name in ("q", "weights", "candidates") else tensor for name, tensor in given.items()}
    assert torch.equal(candidate_topk(**one, topk=32, backend="triton"), expected[:1])


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_in_pages(backend: Any, dtype: torch.dtype) -> None:
    """Pages in any order, scales behind the keys of each, as SGLang keeps them: what it is without."""
    page, dim, lengths = 16, 32, [100, 37, 160]
    generator = torch.Generator().manual_seed(1)
    pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(pages) + 3, generator=generator).int()
    table = torch.zeros(len(lengths), max(pages) + 2, dtype=torch.int32)
    width = dim * torch.empty(0, dtype=dtype).element_size()
    cache = torch.zeros(len(order), page * (width + 4), dtype=torch.uint8)
    keys, scales = in_pages(cache, page, dim, dtype)
    requests, parts = torch.tensor([2, 0, 0, 1, 2], dtype=torch.int32), []
    for request, length in enumerate(lengths):
        table[request, : pages[request]] = order[sum(pages[:request]) :][: pages[request]]
        given = inputs(len(requests), length, 90, dtype=dtype, seed=request)
        scale = torch.ones(length) if "k_scale" not in given else given["k_scale"].cpu()
        for position in range(length):
            at = int(table[request, position // page]), position % page
            keys.view(torch.uint8)[at] = given["k"].cpu().view(torch.uint8)[position]
            scales[at] = scale[position]
        parts.append({**given, "k_scale": scale.to(DEVICE)})
    rows = list(enumerate(requests.tolist()))
    own = [
        {name: parts[request][name][row : row + 1] for name in ("q", "weights", "candidates")} for row, request in rows
    ]
    expected = [
        candidate_topk(**given, k=parts[request]["k"], k_scale=parts[request]["k_scale"], topk=32, backend=backend)
        for given, (_, request) in zip(own, rows, strict=True)
    ]
    keys, scales = in_pages(cache.to(DEVICE), page, dim, dtype)
    found = candidate_topk(
        **{name: torch.cat([given[name] for given in own]) for name in own[0]},
        k=keys,
        k_scale=scales,
        pages=Pages(table.to(DEVICE), requests.to(DEVICE)),
        topk=32,
        backend=backend,
    )
    assert torch.equal(found, torch.cat(expected))


def in_pages(cache: Tensor, page: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys `[P, page, dim]` and scales `[P, page]` of `[P, bytes]`."""
    width = page * dim * torch.empty(0, dtype=dtype).element_size()
    return cache[:, :width].view(dtype).unflatten(1, (page, dim)), cache[:, width:].view(torch.float32)


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_nothing_to_select(backend: Any) -> None:
    given = inputs(3, 40, 20)
    none = {**given, "candidates": given["candidates"][:, :0]}
    assert (candidate_topk(**none, topk=4, backend=backend) == -1).all()
    empty = {name: tensor if name == "k" else tensor[:0] for name, tensor in given.items()}
    assert candidate_topk(**empty, topk=4, backend=backend).shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 4, 8)}, r"q is \[3, 4, 8\] and k \[40, 32\]"),
        ({"k": torch.zeros(40, 32, dtype=torch.bfloat16)}, "expected the same one of"),
        ({"candidates": torch.zeros(2, 20, dtype=torch.int32)}, r"candidates is \[2, 20\], expected \[3, N\]"),
        ({"candidates": torch.zeros(3, 20, dtype=torch.int64)}, "candidates is torch.int64, expected torch.int32"),
        ({"weights": torch.zeros(3, 5)}, r"weights is \[3, 5\], expected \[3, 4\]"),
        ({"k_scale": torch.zeros(39)}, r"k_scale is \[39\], expected \[40\]"),
        ({"topk": 0}, "topk is 0, expected at least 1"),
        ({"candidates": torch.zeros(3, 16385, dtype=torch.int32), "backend": "triton"}, "of 16385 candidates"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {**{name: tensor.cpu() for name, tensor in inputs(3, 40, 20).items()}, "topk": 4, **change}
    with pytest.raises(KernelInputError, match=message):
        candidate_topk(**given)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_in_a_cuda_graph_a_hundred_times() -> None:
    given = inputs(64, 20000, 8192, 32, 128, torch.float8_e4m3fn)
    expected = candidate_topk(**given, topk=2048)
    check(expected, given, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = candidate_topk(**given, topk=2048)
    for _ in range(100):
        found.fill_(7)
        graph.replay()
        assert torch.equal(found, expected)
