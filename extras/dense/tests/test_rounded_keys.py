"""Cached keys in 4 bits and the scores of pages by them; under Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from extras.dense.tests.test_compressed_keys import cache
from indexcache_dense.kernels import CachedPages, PageBudget, RoundedKeys, StepMemory, round_keys, rounded_scores
from indexcache_kernels import KernelInputError
from tests.kernels.interpreter import DEVICE, INTERPRETED, LARGE, poisoned

__all__ = ["poisoned"]  # a fixture of every test here

SHAPES = [  # slots of a table's page, tokens of a page, heads, key heads, dimensions
    (1, 16, 6, 2, 16),
    (16, 64, 28, 4, 128),
    (1, 4, 9, 3, 80),
    pytest.param(4, 128, 3, 3, 64, marks=pytest.mark.slow),
    pytest.param(64, 256, 32, 8, 128, marks=LARGE),
]
FEW = PageBudget(page_tokens=16, pages=4, recent_pages=1)


def nothing(k: Tensor) -> RoundedKeys:
    """Room whose contents would be seen: codes of 15, ranges of NaN."""
    empty = RoundedKeys.allocate(k)
    empty.codes.fill_(255)
    empty.ranges.fill_(torch.nan)
    return empty


def read(given: dict[str, Any], backend: Any) -> RoundedKeys:
    rounded = nothing(given["k"])
    round_keys(given["k"], rounded, given["pages"], backend=backend)
    return rounded


def scored(given: dict[str, Any], rounded: RoundedKeys, budget: PageBudget, backend: Any, **more: Any) -> Tensor:
    rest = {name: value for name, value in given.items() if name != "k"}
    scale = given["q"].shape[2] ** -0.5
    return rounded_scores(rounded=rounded, scale=scale, budget=budget, backend=backend, **rest, **more)


def same(one: RoundedKeys, other: RoundedKeys) -> bool:
    return torch.equal(one.codes, other.codes) and torch.equal(one.ranges.nan_to_num(7.0), other.ranges.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_rounded_to_the_nearest_level(dtype: torch.dtype) -> None:
    """A dimension moves by at most half a step, and the range's own rounding; the ends of the range stay."""
    k = (torch.randn(50, 3, 80, generator=torch.Generator().manual_seed(0)) * 5 + 3).to(DEVICE, dtype)
    k[7] = 2.5  # a key of one value
    rounded = RoundedKeys.of(k)
    exact = k.double()
    step = (exact.amax(-1) - exact.amin(-1)) / 15
    apart = (rounded.keys.double() - exact).abs()
    slack = exact.abs().amax(-1, keepdim=True) * 2**-9
    assert bool((apart <= step[..., None] / 2 + slack).all())
    assert float(apart.amax()) > 0.3 * float(step.amax())
    assert torch.equal(rounded.keys[7].to(dtype), k[7])


def test_scores_are_those_of_float64() -> None:
    lengths = [300, 129, 512, 200]
    for page_tokens in (4, 16, 64):
        given = cache(lengths, 512, 1, 8, 2, 32)
        found = scored(given, read(given, "naive"), PageBudget(page_tokens, pages=2, recent_pages=1), "naive")
        for row, length in enumerate(lengths):
            keys = RoundedKeys.of(given["k"][given["pages"].table[row, :length].long()]).keys.double()  # [L, G, D]
            expected = torch.zeros(-(-length // page_tokens), dtype=torch.float64, device=DEVICE)
            for group in (0, 1):
                shares = (keys[:, group] @ given["q"][row, 4 * group : 4 * group + 4].double().T * 32**-0.5).softmax(0)
                expected += torch.stack([part.sum(0).amax() for part in shares.split(page_tokens)])
            torch.testing.assert_close(found[row, : len(expected)].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("table_page", "page_tokens", "heads", "kv_heads", "dim"), SHAPES)
def test_kernels_are_their_definitions(table_page: int, page_tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    budget = PageBudget(page_tokens, pages=3, recent_pages=1, sink_pages=1)
    width = max(256, 4 * page_tokens) if INTERPRETED else 1024
    lengths = [3 * page_tokens, 3 * page_tokens + 1, width - 70, width, 1]
    given = cache(lengths, width, table_page, heads, kv_heads, dim)
    rounded = {backend: read(given, backend) for backend in ("naive", "triton")}
    assert same(rounded["triton"], rounded["naive"]) or not INTERPRETED
    assert int(rounded["triton"].ranges.isfinite().all(2).all(0).sum()) == sum(lengths)
    expected = scored(given, rounded["naive"], budget, "naive")
    found = [scored(given, rounded["naive"], budget, "triton", splits=splits) for splits in (1, 3, 4)]
    for row, length in enumerate(lengths):
        live = -(-length // page_tokens)
        live = live if live > budget.pages else 0
        for one in found:
            torch.testing.assert_close(one[row, :live], expected[row, :live], rtol=2e-5, atol=1e-6)
            assert one[row, live:].isnan().all()  # nothing else is written


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_decoded_tokens_are_rounded_as_prompts_are(backend: Any) -> None:
    given = cache([70, 37, 16], 96, 16, 4, 2, 32)
    whole = read(given, backend)
    rounded = nothing(given["k"])
    for length in range(1, 71):
        pages = replace(given["pages"], lengths=given["pages"].lengths.clamp_max(length))
        round_keys(given["k"], rounded, pages, newest=True, backend=backend)
    assert same(rounded, whole)


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("table_page", [1, 16])
def test_lists_are_tables_with_rows_of_any_length(table_page: int, backend: Any) -> None:
    lengths = [130, 1, 64, 210, 65]
    given = cache(lengths, 256, table_page, 8, 2, 64)
    rounded = read(given, backend)
    scores = scored(given, rounded, FEW, backend)
    counts = [-(-length // table_page) for length in lengths]
    table = torch.cat([given["pages"].table[row, :count] for row, count in enumerate(counts)])
    starts = torch.tensor([sum(counts[:row]) for row in range(5)], dtype=torch.int32, device=DEVICE)
    listed = {**given, "pages": replace(given["pages"], table=table, starts=starts)}
    assert same(read(listed, backend), rounded)
    out = torch.empty_like(scores)
    scored(listed, rounded, FEW, backend, out=out)
    assert torch.equal(out.nan_to_num(), scores.nan_to_num())


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_steps_that_hold_their_pages_read_nothing(backend: Any) -> None:
    given = cache([130, 140, 150], 256, 1, 4, 2, 32)
    memory = StepMemory(
        requests=torch.tensor([4, 0, 2], device=DEVICE),
        steps=torch.tensor([3, 0, 1, 0, 6], dtype=torch.int32, device=DEVICE),
        held=torch.zeros(5, 16, dtype=torch.bool, device=DEVICE),
        every=3,
    )
    found = scored(given, read(given, backend), FEW, backend, memory=memory)
    assert [bool(row[:8].isfinite().all()) for row in found] == [True, True, False]
    assert found[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: Any) -> None:
    given = cache([130, 250], 256, 16, 8, 2, 64, dtype)
    rounded = read(given, "naive")
    assert same(read(given, "triton"), rounded) or not INTERPRETED
    found, expected = (scored(given, rounded, FEW, backend) for backend in ("triton", "naive"))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4, equal_nan=True)


def test_it_is_the_same_bits_each_time() -> None:
    given = cache([140, 200], 256, 1, 8, 2, 64)
    rounded = read(given, "triton")
    first = scored(given, rounded, FEW, "triton")
    for _ in range(1 if INTERPRETED else 100):
        assert torch.equal(scored(given, rounded, FEW, "triton").nan_to_num(), first.nan_to_num())


KEYS = torch.zeros(2, 64, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": torch.zeros(1, 3, 16)},
            r"q is \[1, 3, 16\] and codes \[2, 64, 8\], expected \[1, H, D\] and \[G, slots",
        ),
        ({"rounded": RoundedKeys.of(KEYS)._replace(ranges=torch.zeros(2, 64, 2))}, "ranges is .* of torch.float16"),
        ({"rounded": RoundedKeys.of(KEYS.mT)}, r"q is \[1, 4, 16\] and codes \[2, 16, 32\]"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, r"lengths is \[2\] of torch.int32, expected \[1\]"),
        ({"table": torch.zeros(64, dtype=torch.int32)}, r"table is \[64\] of torch.int32, expected \[B, M\]"),
        ({"table_page": 3}, r"table_page is 3, expected a divisor of page_tokens \(16\)"),
    ],
)
def test_what_does_not_fit_together(changes: dict[str, Any], message: str) -> None:
    cached = {"table": torch.zeros(1, 64, dtype=torch.int32), "lengths": torch.ones(1, dtype=torch.int32)}
    given = {
        "q": torch.zeros(1, 4, 16),
        "rounded": RoundedKeys.of(KEYS),
        "budget": FEW,
        "table_page": 1,
        **cached,
        **changes,
    }
    with pytest.raises(KernelInputError, match=message):
        pages = CachedPages(*(given.pop(name) for name in ("table", "lengths", "table_page")))
        rounded_scores(**given, pages=pages, scale=1.0, backend="naive")


def test_what_does_not_fit_the_cache() -> None:
    pages = CachedPages(torch.zeros(1, 64, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    for k, message in (
        (torch.zeros(64, 2, 15), r"k is \[64, 2, 15\], expected \[slots, G, D\] with an even D"),
        (torch.zeros(63, 2, 16), r"codes is \[2, 64, 8\] of torch.uint8, expected \[2, 63, 8\]"),
        (torch.zeros(64, 1, 16), r"codes is \[2, 64, 8\] of torch.uint8, expected \[1, 64, 8\]"),
    ):
        with pytest.raises(KernelInputError, match=message):
            round_keys(k, RoundedKeys.of(KEYS), pages, backend="naive")
