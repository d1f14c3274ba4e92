"""Means of cached keys and the scores of pages by them; under Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_dense.kernels import CachedPages, PageBudget, StepMemory, compressed_scores, update_means
from indexcache_kernels import KernelInputError
from indexcache_lab.kernels import block_scores, compress_keys
from tests.kernels.interpreter import DEVICE, INTERPRETED, LARGE, poisoned

__all__ = ["poisoned"]  # a fixture of every test here

SHAPES = [  # slots of a table's page, tokens of a page, heads, key heads, dimensions
    (1, 16, 6, 2, 16),
    (16, 64, 28, 4, 128),
    pytest.param(32, 32, 9, 3, 80, marks=LARGE),
    pytest.param(64, 64, 32, 8, 128, marks=LARGE),
    (1, 128, 3, 3, 64),
]
FEW = PageBudget(page_tokens=16, pages=4, recent_pages=1)


def cache(
    lengths: list[int], width: int, table_page: int, heads: int, kv_heads: int, dim: int, dtype: Any = torch.float32
) -> dict[str, Any]:
    """Queries, keys in shuffled pages of a multiple of 16 slots, and no means yet."""
    generator = torch.Generator().manual_seed(sum(lengths) + table_page)
    rows, held = len(lengths), max(16, table_page)
    pages = torch.randperm(rows * width // held, generator=generator).view(rows, -1, 1) * (held // table_page)
    table = (pages + torch.arange(held // table_page)).flatten(1)
    k = torch.randn(rows * width, kv_heads, dim, generator=generator)
    return {
        "q": (torch.randn(rows, heads, dim, generator=generator) * 2).to(DEVICE, dtype),
        "k": k.to(DEVICE, dtype),
        "pages": CachedPages(
            table.int().to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), table_page
        ),
    }


def no_means(k: Tensor) -> Tensor:
    return torch.full((len(k) // 16, *k.shape[1:]), torch.nan, dtype=k.dtype, device=DEVICE)


def read(given: dict[str, Any], backend: Any) -> Tensor:
    means = no_means(given["k"])
    update_means(given["k"], means, given["pages"], backend=backend)
    return means


def scored(given: dict[str, Any], means: Tensor, budget: PageBudget, backend: Any, **more: Any) -> Tensor:
    rest = {name: value for name, value in given.items() if name != "k"}
    scale = given["q"].shape[2] ** -0.5
    return compressed_scores(means=means, scale=scale, budget=budget, backend=backend, **rest, **more)


def test_the_rule_is_that_of_block_scores() -> None:
    """Two means make a compressed key; what a page gets are the shares of those that touch it."""
    lengths = [300, 129, 512, 200]
    for page_tokens in (16, 64):
        given = cache(lengths, 512, 1, 8, 2, 32)
        budget = PageBudget(page_tokens, pages=2, recent_pages=1)
        found = scored(given, read(given, "naive"), budget, "naive")
        for row, length in enumerate(lengths):
            k = given["k"][given["pages"].table[row, :length].long()].transpose(0, 1)[None]
            expected = block_scores(
                given["q"][row : row + 1],
                compress_keys(k),
                given["pages"].lengths[row : row + 1],
                scale=32**-0.5,
                block_tokens=page_tokens,
                backend="naive",
            )[0]
            live = min(-(-length // page_tokens), len(expected))
            torch.testing.assert_close(found[row, :live], expected[:live], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("table_page", "page_tokens", "heads", "kv_heads", "dim"), SHAPES)
def test_kernels_are_their_definitions(table_page: int, page_tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    budget = PageBudget(page_tokens, pages=3, recent_pages=1, sink_pages=1)
    lengths = [3 * page_tokens, 3 * page_tokens + 1, 700, 1024, 1]
    given = cache(lengths, 1024, table_page, heads, kv_heads, dim)
    means = {backend: read(given, backend) for backend in ("naive", "triton")}
    torch.testing.assert_close(means["triton"], means["naive"], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert int(means["naive"].isfinite().all(2).all(1).sum()) == sum(length // 16 for length in lengths)
    expected = scored(given, means["naive"], budget, "naive")
    found = [scored(given, means["naive"], budget, "triton", splits=splits) for splits in (1, 4)]
    for row, length in enumerate(lengths):
        live = -(-length // page_tokens)
        live = live if live > budget.pages else 0
        for one in found:
            torch.testing.assert_close(one[row, :live], expected[row, :live], rtol=2e-5, atol=1e-6)
            assert one[row, live:].isnan().all()  # nothing else is written


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_decoded_tokens_complete_groups(backend: Any) -> None:
    """What steps write one by one is what a pass over the prompt writes; unfinished groups have nothing."""
    given = cache([200, 77, 16], 256, 16, 4, 2, 32)
    whole = read(given, backend)
    means = no_means(given["k"])
    for length in range(1, 201):
        pages = replace(given["pages"], lengths=given["pages"].lengths.clamp_max(length))
        update_means(given["k"], means, pages, newest=True, backend=backend)
    assert torch.equal(means.nan_to_num(7.0), whole.nan_to_num(7.0))


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("table_page", [1, 16])
def test_lists_are_tables_with_rows_of_any_length(table_page: int, backend: Any) -> None:
    lengths = [130, 1, 64, 210, 65]
    given = cache(lengths, 256, table_page, 8, 2, 64)
    means = read(given, backend)
    scores = scored(given, means, FEW, backend)
    counts = [-(-length // table_page) for length in lengths]
    table = torch.cat([given["pages"].table[row, :count] for row, count in enumerate(counts)])
    starts = torch.tensor([sum(counts[:row]) for row in range(5)], dtype=torch.int32, device=DEVICE)
    listed = {**given, "pages": replace(given["pages"], table=table, starts=starts)}
    assert torch.equal(read(listed, backend).nan_to_num(7.0), means.nan_to_num(7.0))
    out = torch.empty_like(scores)
    scored(listed, means, FEW, backend, out=out)
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
    means = {backend: read(given, backend) for backend in ("naive", "triton")}
    torch.testing.assert_close(means["triton"], means["naive"], rtol=1e-2, atol=1e-2, equal_nan=True)
    found, expected = (scored(given, means["naive"], FEW, backend) for backend in ("triton", "naive"))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4, equal_nan=True)


def test_it_is_the_same_bits_each_time() -> None:
    given = cache([140, 200], 256, 1, 8, 2, 64)
    means = read(given, "triton")
    first = scored(given, means, FEW, "triton")
    for _ in range(1 if INTERPRETED else 100):
        assert torch.equal(scored(given, means, FEW, "triton").nan_to_num(), first.nan_to_num())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 3, 16)}, r"q is \[1, 3, 16\] and means \[4, 2, 16\], expected \[1, H, D\]"),
        ({"q": torch.zeros(1, 4, 16).half()}, "q is torch.float16 and means torch.float32, expected one dtype"),
        ({"budget": PageBudget(8, pages=4, recent_pages=1)}, "page_tokens is 8, expected a multiple of 16"),
        ({"means": torch.zeros(4, 16, 2).mT}, r"means \[4, 2, 16\], expected \[slots, G, D\], dimensions side by side"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, r"lengths is \[2\] of torch.int32, expected \[1\]"),
        ({"table": torch.zeros(64, dtype=torch.int32)}, r"table is \[64\] of torch.int32, expected \[B, M\]"),
        ({"table_page": 3}, r"table_page is 3, expected a divisor of page_tokens \(16\)"),
    ],
)
def test_what_does_not_fit_together(changes: dict[str, Any], message: str) -> None:
    cached = {"table": torch.zeros(1, 64, dtype=torch.int32), "lengths": torch.ones(1, dtype=torch.int32)}
    given = {
        "q": torch.zeros(1, 4, 16),
        "means": torch.zeros(4, 2, 16),
        "budget": FEW,
        "table_page": 1,
        **cached,
        **changes,
    }
    with pytest.raises(KernelInputError, match=message):
        pages = CachedPages(*(given.pop(name) for name in ("table", "lengths", "table_page")))
        compressed_scores(**given, pages=pages, scale=1.0, backend="naive")


def test_means_that_do_not_fit_the_cache() -> None:
    pages = CachedPages(torch.zeros(1, 64, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    for means in (torch.zeros(3, 2, 16), torch.zeros(4, 1, 16), torch.zeros(4, 2, 16).half()):
        with pytest.raises(KernelInputError, match=r"means are .* expected a row for 16 of \[64, 2, 16\]"):
            update_means(torch.zeros(64, 2, 16), means, pages, backend="naive")
