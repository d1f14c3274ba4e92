"""Every operation on nothing: an empty result without requests, rows, keys or pages; one line without heads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_dense.kernels import (
    CachedPages,
    PageBudget,
    RoundedKeys,
    StepMemory,
    compressed_scores,
    page_scores,
    round_keys,
    rounded_scores,
    select_pages,
    update_means,
)
from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.grouped_attention import grouped_attention
from indexcache_kernels.indexer_topk import causal_ranges, indexer_topk
from indexcache_kernels.prompt_blocks import IndexSpace, expand_blocks, lowest_last, mean_queries
from indexcache_kernels.sparse_attention import sparse_attention
from indexcache_lab.kernels.block_attention import block_attention
from indexcache_lab.kernels.block_scores import block_scores, compress_keys
from indexcache_lab.kernels.block_swap import BlockBuffer, copy_blocks, swap_blocks
from indexcache_lab.kernels.key_delta import delta_scores, differences, kept_keys, multiply_adds
from indexcache_train.kernels.indexer_kl import indexer_kl

FEW = PageBudget(page_tokens=16, pages=3, recent_pages=1)
real = torch.ones


def whole(*shape: int, value: int = 0) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32)


def empty(requests: int, entries: int) -> CachedPages:
    return CachedPages(whole(requests, entries), whole(requests), 16)


# Sizes: b requests or rows, t queries, h heads, g key heads, n keys, slots or pages, d dimensions, k that are chosen.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "block_attention": lambda b, h, g, n, d, k: block_attention(
        real(b, h, d), real(b, g, n, d), real(b, g, n, d), whole(b, k, value=-1), scale=1.0, block_tokens=16,
        lengths=whole(b), backend="naive",
    ),
    "block_attention of prompts": lambda b, t, h, g, n, d: block_attention(
        real(b, t, h, d), real(b, g, n, d), real(b, g, n, d), whole(b, t, 2, value=-1), scale=1.0, block_tokens=16,
        lengths=whole(b, t),
    ),
    "block_scores": lambda b, h, g, n, d: block_scores(
        real(b, h, d), real(b, g, n, d), whole(b), scale=1.0, block_tokens=16
    ),
    "compress_keys": lambda b, g, n, d: compress_keys(real(b, g, n, d)),
    "swap_blocks": lambda b, k: swap_blocks(whole(b, k, value=-1), whole(b, value=-1), BlockBuffer.empty(b, 4)),
    "copy_blocks": lambda b, n, k, d: copy_blocks(
        real(b, n, d), real(b, n, d), whole(b, k, value=-1), whole(b, k, value=-1), torch.zeros(b, k, dtype=torch.bool)
    ),
    "update_means": lambda b, g, n, d: update_means(
        real(n, g, d), real(n // 16, g, d), CachedPages(whole(b, 4), whole(b))
    ),
    "compressed_scores": lambda b, h, g, n, d: compressed_scores(
        real(b, h, d), real(4, g, d), empty(b, n), scale=1.0, budget=FEW
    ),
    "grouped_attention": lambda b, h, d: grouped_attention(
        real(2 * b, h, d), real(4, d), whole(2 * b, 3), queries=2, scale=1.0, v_dim=d, out=real(2 * b, h, d)
    ),
    "indexer_kl": lambda t, h, g, n, d: indexer_kl(
        real(t, h, d), real(n, g, d), None, 1.0, real(t, 2, d), real(n, d), real(t, 2), whole(t), whole(t, value=n)
    ),
    "indexer_kl of a selection": lambda t, h, g, n, d, k: indexer_kl(
        real(t, h, d), real(n, g, d), None, 1.0, real(t, 2, d), real(n, d), real(t, 2), indices=whole(t, k, value=-1)
    ),
    "indexer_topk": lambda t, h, n, d: indexer_topk(
        real(t, h, d), real(n, d), real(t, h), starts=whole(t), ends=whole(t, value=n), topk=4
    ),
    "delta_scores": lambda t, n, d: delta_scores(real(t, d), differences(real(n, d))),
    "multiply_adds": lambda t, n, d: multiply_adds(
        torch.zeros(n, d, dtype=torch.bool), torch.arange(n)[:t], torch.arange(n)[:t]
    ),
    "page_scores": lambda b, h, g, n, d: page_scores(
        real(b, h, d), real(64, g, d), empty(b, n), lse=real(b, h), scale=1.0, budget=FEW
    ),
    "page_scores of lists": lambda b, h, g, n, d: page_scores(
        real(b, h, d), real(64, g, d), CachedPages(whole(b * n), whole(b), 16, whole(b)), lse=real(b, h), scale=1.0,
        out=real(b, n), budget=FEW,
    ),
    "select_pages": lambda b, n: select_pages(real(b, n), empty(b, n), budget=FEW),
    "mean_queries": lambda b, h, d: mean_queries(real(4, h, d), real(4, h, 1), whole(b), whole(b, value=1)),
    "lowest_last": lambda b, k: lowest_last(real(b, 8), whole(b, k), whole(b), whole(b)),
    "expand_blocks": lambda b, k: expand_blocks(
        whole(b, k), whole(b), whole(b, value=1), whole(b), IndexSpace(), whole(4, k)
    ),
    "round_keys": lambda b, g, n, d: round_keys(
        real(64, g, d), RoundedKeys.allocate(real(64, g, d)), CachedPages(whole(b, n), whole(b))
    ),
    "rounded_scores": lambda b, h, g, n, d: rounded_scores(
        real(b, h, d), RoundedKeys.allocate(real(64, g, d)), empty(b, n), scale=1.0, budget=FEW
    ),
    "sparse_attention": lambda t, h, g, n, d, k: sparse_attention(
        real(t, h, d), real(n, g, d), real(n, g, d), whole(t, k, value=-1), 1.0
    ),
}  # fmt: skip
SIZES = {"b": 2, "t": 2, "h": 4, "g": 2, "n": 32, "d": 16, "k": 3}
NEEDED = "hgd"  # without these there is no operation


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_either_an_empty_result_or_a_line(name: str) -> None:
    operation = OPERATIONS[name]
    letters = operation.__code__.co_varnames
    for given in product(*((0, SIZES[letter]) for letter in letters)):
        sizes = dict(zip(letters, given, strict=True))
        try:
            operation(**sizes)
        except KernelInputError as error:
            assert any(sizes.get(letter) == 0 for letter in NEEDED), (sizes, str(error))
            assert "expected" in str(error) and "\n" not in str(error)


def test_sequences_of_nothing() -> None:
    for cumulated in ([], [0], [0, 0]):
        starts, ends = causal_ranges(torch.tensor(cumulated, dtype=torch.int32))
        assert len(starts) == len(ends) == 0
    with pytest.raises(KernelInputError, match="with a key"):
        kept_keys(real(2, 0, 4), 0.1)


def test_no_keys_are_attended_to_with_zeros() -> None:
    out, lse = sparse_attention(real(2, 4, 16), real(0, 2, 16), real(0, 2, 8), whole(2, 3, value=-1), 1.0)
    assert out.shape == (2, 4, 8) and not out.any() and bool((lse == -torch.inf).all())


def test_more_tokens_than_the_table_has_are_a_line() -> None:
    for pages in (0, 2):
        with pytest.raises(KernelInputError, match=f"request 0 has 96 tokens, and its table {pages} pages of 16"):
            select_pages(real(1, pages), CachedPages(whole(1, pages), whole(1, value=96), 16), budget=FEW)
    with pytest.raises(KernelInputError, match="request 1 has 96 tokens, and its table 4 pages of 16"):
        cached = CachedPages(whole(2, 4), torch.tensor([16, 96], dtype=torch.int32), 16)
        page_scores(real(2, 4, 8), real(64, 2, 8), cached, lse=real(2, 4), scale=1.0, budget=FEW)


ONE_DEVICE = "tensors are on cpu and meta, expected one device"


@pytest.mark.parametrize("far", range(5))
def test_pages_are_selected_on_one_device(far: int) -> None:
    """A table left on the host was read as garbage by the kernel."""
    tensors = [real(2, 4, 8), real(64, 2, 8), whole(2, 4), whole(2, value=64), real(2, 4)]
    tensors[far] = tensors[far].to("meta")
    q, k, table, lengths, lse = tensors
    with pytest.raises(KernelInputError, match=ONE_DEVICE):
        page_scores(q, k, CachedPages(table, lengths, 16), lse=lse, scale=1.0, budget=FEW)


@pytest.mark.parametrize("far", ["table", "lengths", "starts"])
def test_pages_of_a_cache_are_on_one_device(far: str) -> None:
    tensors = {"table": whole(8), "lengths": whole(2), "starts": whole(2)}
    with pytest.raises(KernelInputError, match=ONE_DEVICE):
        CachedPages(**{**tensors, far: tensors[far].to("meta")})  # type: ignore[arg-type]


PAGES = CachedPages(whole(2, 4), whole(2, value=64), 16)
ROUNDED = RoundedKeys.allocate(real(64, 2, 16))
BESIDE_THE_PAGES: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "page_scores": (
        lambda **given: page_scores(pages=PAGES, scale=1.0, budget=FEW, **given),
        {"q": real(2, 4, 16), "k": real(64, 2, 16), "lse": real(2, 4), "out": real(2, 4)},
    ),
    "select_pages": (
        lambda **given: select_pages(pages=PAGES, budget=FEW, **given),
        {"scores": real(2, 4), "out_table": whole(6), "out_starts": whole(2), "out_lengths": whole(2)},
    ),
    "update_means": (
        lambda **given: update_means(pages=PAGES, **given),
        {"k": real(64, 2, 16), "means": real(4, 2, 16)},
    ),
    "compressed_scores": (
        lambda **given: compressed_scores(pages=PAGES, scale=1.0, budget=FEW, **given),
        {"q": real(2, 4, 16), "means": real(4, 2, 16), "out": real(2, 4)},
    ),
    "round_keys": (
        lambda codes, ranges, **given: round_keys(rounded=RoundedKeys(codes, ranges), pages=PAGES, **given),
        {"k": real(64, 2, 16), **ROUNDED._asdict()},
    ),
    "rounded_scores": (
        lambda codes, ranges, **given: rounded_scores(
            rounded=RoundedKeys(codes, ranges), pages=PAGES, scale=1.0, budget=FEW, **given
        ),
        {"q": real(2, 4, 16), "out": real(2, 4), **ROUNDED._asdict()},
    ),
}


@pytest.mark.parametrize(
    ("name", "far"), [(name, tensor) for name, (_, tensors) in BESIDE_THE_PAGES.items() for tensor in tensors]
)
def test_every_tensor_is_on_the_device_of_the_pages(name: str, far: str) -> None:
    operation, tensors = BESIDE_THE_PAGES[name]
    operation(**tensors)
    with pytest.raises(KernelInputError, match=ONE_DEVICE):
        operation(**{**tensors, far: tensors[far].to("meta")})


def test_what_is_written_and_remembered_is_on_that_device_too() -> None:
    memory = StepMemory(torch.zeros(2, dtype=torch.int64), whole(2), averages=real(2, 4).to("meta"), beta=0.5)
    for more in ({"out_table": whole(2, 3).to("meta")}, {"out_lengths": whole(2).to("meta")}, {"memory": memory}):
        with pytest.raises(KernelInputError, match=ONE_DEVICE):
            select_pages(real(2, 4), PAGES, budget=FEW, **more)  # type: ignore[arg-type]
