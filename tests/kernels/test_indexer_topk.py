"""indexer_topk against its definition; under Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_kernels import KernelInputError, causal_ranges, indexer_topk
from indexcache_kernels.indexer_topk import naive
from tests.kernels.interpreter import DEVICE, INTERPRETED, KERNELS, LARGE, poisoned

__all__ = ["poisoned"]  # a fixture of every test here

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def inputs(queries: int, keys: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random queries, keys, weights of both signs, and scales of quantised keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    found = {
        "q": normal(queries, heads, dim).to(dtype),
        "k": normal(keys, dim).to(dtype),
        "weights": normal(queries, heads),
    }
    if dtype == torch.float8_e4m3fn:
        found["k_scale"] = normal(keys).exp()
    return found


def causal(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Ranges of queries that are the last of `keys` tokens."""
    ends = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=DEVICE)
    return torch.zeros_like(ends), ends


def check_topk(found: Tensor, given: dict[str, Tensor], starts: Tensor, ends: Tensor, topk: int) -> None:
    """Every row holds as many keys as it can, each once, and none left out scores higher than one taken, but for
    rounding."""
    scores = naive.indexer_scores(
        given["q"].double(), given["k"].double(), given["weights"].double(), given.get("k_scale")
    )
    assert found.dtype == torch.int32 and found.shape == (len(starts), topk)
    for row, chosen, start, end in zip(scores, found.tolist(), starts.tolist(), ends.tolist(), strict=True):
        kept = [index for index in chosen if index >= 0]
        assert kept == chosen[: len(kept)] and len(kept) == len(set(kept))
        assert len(kept) == min(topk, max(0, end - start))
        assert all(start <= index < end for index in kept)
        others = sorted(set(range(start, end)) - set(kept))
        if kept and others:
            tolerance = 1e-5 * row.abs().max()
            assert row[others].max() <= row[kept].min() + tolerance


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=LARGE if dtype.itemsize == 2 else ()) for dtype in DTYPES], ids=str
)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "dim", "topk"),
    [
        *((1, 1, 1, 16, 4), (23, 23, 4, 32, 16), (5, 111, 3, 24, 64), (3, 130, 64, 128, 200)),
        pytest.param(17, 1000, 32, 128, 100, marks=LARGE),
    ],
)
def test_indexer_topk_takes_the_highest_scores(
    queries: int, keys: int, heads: int, dim: int, topk: int, dtype: torch.dtype
) -> None:
    given, (starts, ends) = inputs(queries, keys, heads, dim, dtype), causal(queries, keys)
    check_topk(indexer_topk(**given, starts=starts, ends=ends, topk=topk, backend="triton"), given, starts, ends, topk)


def test_indexer_topk_of_ragged_sequences() -> None:
    lengths = torch.tensor([0, 7, 8, 21, 21, 40], dtype=torch.int32, device=DEVICE)
    starts, ends = causal_ranges(lengths)
    assert starts.tolist()[:9] == [0] * 7 + [7, 8] and ends.tolist()[:3] == [1, 2, 3]
    given = inputs(40, 40, 32, 32, torch.bfloat16)
    found = indexer_topk(**given, starts=starts, ends=ends, topk=16, backend="triton")
    check_topk(found, given, starts, ends, 16)


@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["misleading sample", "equal", *(pytest.param(kind, marks=LARGE) for kind in ("random", "rising"))]
)
def test_indexer_topk_of_rows_longer_than_the_room_for_candidates(
    kind: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, queries, keys, misled = KERNELS["indexer_topk"], 5, 450, []

    class Merge:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def run(**given: Any) -> None:
                merge[grid](**given)
                misled.append(given["todo_ptr"].tolist().count(2))

            return run

    merge = kernels.merge_kernel
    monkeypatch.setattr(kernels, "merge_kernel", Merge())
    monkeypatch.setattr(kernels, "SEGMENT", 64)
    given = {name: tensor.round() for name, tensor in inputs(queries, keys, 2, 16, torch.float32).items()}  # exact
    given["weights"].abs_()
    starts, ends = causal(queries, keys)
    starts[1], ends[1] = 300, 400
    if kind == "misleading sample":
        sampled = given["k"][:: keys // (64 if splits == 1 else 128)]  # as many keys as are sampled
        sampled[:] = given["q"][0, 0] * torch.arange(9, 9 + len(sampled), device=DEVICE)[:, None]
    elif kind == "rising":  # every key is a candidate
        given["k"][:] = given["q"][0, 0] * torch.arange(keys, device=DEVICE)[:, None]
    elif kind == "equal":
        given["weights"][:] = 0.0
    found = kernels.indexer_topk(**given, starts=starts, ends=ends, topk=60, splits=splits)
    assert torch.equal(found, indexer_topk(**given, starts=starts, ends=ends, topk=60, backend="naive"))
    if splits > 1:  # what equals a bound is a candidate, so equal scores are not done twice
        assert (misled[0] > 0) == (kind == "misleading sample") and misled[1] == 0


def check_long(
    found: Tensor, given: dict[str, Tensor], starts: Tensor, ends: Tensor, topk: int, dtype: torch.dtype
) -> None:
    """As `check_topk`, on a device; its bound is of the highest score."""
    keys = len(given["k"])
    place = torch.arange(keys, device=DEVICE)
    for rows in torch.arange(len(found), device=DEVICE).split(250):
        part = {name: tensor[rows] if name in ("q", "weights") else tensor for name, tensor in given.items()}
        scores = naive.indexer_scores(**{name: tensor.double() for name, tensor in part.items()})
        outside = (place < starts[rows, None]) | (place >= ends[rows, None])
        scores = scores.masked_fill(outside, -torch.inf)
        chosen = torch.zeros(len(rows), keys + 1, dtype=torch.bool, device=DEVICE)
        chosen = chosen.scatter_(1, found[rows].long() % (keys + 1), True)[:, :keys]
        assert torch.equal(chosen.sum(1), (~outside).sum(1).clamp(max=topk)) and not (chosen & outside).any()
        lowest = scores.masked_fill(~chosen, torch.inf).amin(1)
        left_out = scores.masked_fill(chosen, -torch.inf).amax(1)
        excess = (left_out - lowest) / scores.masked_fill(outside, 0.0).abs().amax(1)
        assert excess.max() <= (1e-3 if dtype == torch.float8_e4m3fn else 1e-5)  # its tensor cores keep fewer bits


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indexer_topk_of_long_contexts(dtype: torch.dtype, heads: int) -> None:
    queries, keys = 2000, 20_000  # more blocks of queries than programs, and every path of the kernel
    given, (starts, ends) = inputs(queries, keys, heads, 128, dtype), causal(queries, keys)
    starts[100:200], ends[300:400] = 15_000, 3_000
    found = indexer_topk(**given, starts=starts, ends=ends, topk=2048)
    check_long(found, given, starts, ends, 2048, dtype)
    for _ in range(100):
        assert torch.equal(found, indexer_topk(**given, starts=starts, ends=ends, topk=2048))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
@pytest.mark.parametrize("topk", [2048, 8192])
@pytest.mark.parametrize("kind", ["random", "rising", "equal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_indexer_topk_while_decoding(dtype: torch.dtype, kind: str, topk: int) -> None:
    """Requests of several lengths with keys of their own, in a CUDA graph."""
    lengths = torch.tensor([1, 2_000, 50_000, 4_097, 50_000, 17_123, 30_000], dtype=torch.int32, device=DEVICE)
    ends = lengths.cumsum(0, dtype=torch.int32)
    starts = ends - lengths
    given = inputs(len(lengths), int(ends[-1]), 32, 128, dtype)
    if kind == "rising":
        given["weights"].abs_()
        order = naive.indexer_scores(**{name: tensor.float() for name, tensor in given.items()})[2].argsort()
        for name in given.keys() & {"k", "k_scale"}:
            given[name] = given[name][order]
    elif kind == "equal":
        given["weights"][:] = 0.0
    found = indexer_topk(**given, starts=starts, ends=ends, topk=topk)
    if kind != "equal":
        check_long(found, given, starts, ends, topk, dtype)
    else:  # the first of equal ones
        assert torch.equal(found[2], starts[2] + torch.arange(topk, dtype=torch.int32, device=DEVICE))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = indexer_topk(**given, starts=starts, ends=ends, topk=topk)
    for _ in range(100):
        graph.replay()
        assert torch.equal(found, again)


def test_indexer_topk_takes_the_lowest_of_equal_scores() -> None:
    queries, keys = 4, 100
    given = {name: tensor.round() for name, tensor in inputs(queries, keys, 2, 16, torch.float32).items()}  # exact
    given["k"][:] = given["k"][:4].repeat(25, 1)  # every score 25 times
    given["weights"][1] = 0.0  # all equal
    given["weights"][2] = -1.0  # zeros of both signs
    starts, ends = causal(queries, keys)
    found = indexer_topk(**given, starts=starts, ends=ends, topk=30, backend="triton")
    assert torch.equal(found, indexer_topk(**given, starts=starts, ends=ends, topk=30, backend="naive"))
    assert found[1].tolist() == list(range(30))


def test_indexer_topk_of_rows_that_see_nothing() -> None:
    given = inputs(3, 8, 2, 16, torch.float32)
    starts, ends = (torch.tensor(item, dtype=torch.int32, device=DEVICE) for item in ([0, 5, 2], [0, 5, 4]))
    for backend in ("naive", "triton"):
        found = indexer_topk(**given, starts=starts, ends=ends, topk=3, backend=backend)  # type: ignore[arg-type]
        assert found.tolist() == [[-1, -1, -1], [-1, -1, -1], [2, 3, -1]]


def test_indexer_topk_repeats_bit_for_bit() -> None:
    given, (starts, ends) = inputs(5, 130, 4, 32, torch.bfloat16), causal(5, 130)
    first = indexer_topk(**given, starts=starts, ends=ends, topk=50, backend="triton")
    for _ in range(1 if INTERPRETED else 100):
        assert torch.equal(first, indexer_topk(**given, starts=starts, ends=ends, topk=50, backend="triton"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda q: q[:, 0], "q is [4, 16] and k [9, 16], expected [T, I, C] and [L, C]"),
        ("k", lambda k: k.bfloat16(), "q is torch.float32 and k torch.bfloat16"),
        ("weights", lambda weights: weights[:2], "weights is [2, 2] of torch.float32, expected [4, 2]"),
        ("starts", lambda starts: starts.long(), "starts is [4] of torch.int64, expected [4] of torch.int32"),
        ("topk", lambda topk: 0, "topk is 0, expected at least 1"),
        ("topk", lambda topk: 8193, "topk is 8193, expected at most 8192 with backend triton"),
        ("backend", lambda backend: "fast", "backend is fast, expected auto, naive or triton"),
    ],
)
def test_indexer_topk_says_what_does_not_fit(name: str, change: object, message: str) -> None:
    starts, ends = causal(4, 9)
    given = {**inputs(4, 9, 2, 16, torch.float32), "starts": starts, "ends": ends, "topk": 2, "backend": "triton"}
    given[name] = change(given[name])  # type: ignore[operator]
    with pytest.raises(KernelInputError) as error:
        indexer_topk(**given)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize("topk", [1, 40, 500])
@pytest.mark.parametrize("exact", [True, False], ids=["ties", "no ties"])
@pytest.mark.parametrize("lengths", [(0, 300), (0, 7, 140, 141, 400)], ids=["one sequence", "several"])
def test_the_definition_is_a_stable_sort_of_all_scores(lengths: tuple[int, ...], exact: bool, topk: int) -> None:
    """It goes on from block to block of queries, each with the keys that it sees."""
    given = inputs(lengths[-1], lengths[-1], 4, 16, torch.float32)
    if exact:
        given = {name: tensor.round() for name, tensor in given.items()}
    starts, ends = causal_ranges(torch.tensor(lengths, device=DEVICE))
    found = indexer_topk(**given, starts=starts, ends=ends, topk=topk, backend="naive")
    scores = naive.indexer_scores(**{name: tensor.double() for name, tensor in given.items()})
    for row, chosen, start, end in zip(scores, found.tolist(), starts.tolist(), ends.tolist(), strict=True):
        seen = row[start:end].sort(descending=True, stable=True).indices[:topk] + start
        expected = sorted(seen.tolist())
        assert chosen == expected + [-1] * (topk - len(expected))
