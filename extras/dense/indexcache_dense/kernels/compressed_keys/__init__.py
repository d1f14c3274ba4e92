"""Scores of cached pages by compressed keys, from means that lie beside a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_dense.kernels.compressed_keys import naive
from indexcache_dense.kernels.compressed_keys.naive import GROUP
from indexcache_dense.kernels.page_selection import PageBudget, StepMemory
from indexcache_dense.kernels.page_selection.pages import CachedPages, check_table
from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect, expect_one_device, share_evenly

__all__ = ["GROUP", "compressed_scores", "update_means"]


def update_means(
    k: Tensor,
    means: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    table_page: int = 1,
    starts: Tensor | None = None,
    newest: bool = False,
    backend: Backend = "auto",
) -> None:
    """Write the mean key of each complete group of 16 tokens.

    A group's mean lies where its keys do: the keys of slots 16 i to 16 i + 15 have row i. So a group must fill such
    slots, which a cache with pages of a multiple of 16 slots sees to, and requests that share pages share means.

    Args:
        k: `[slots, G, D]`, a layer's key cache: float32, bfloat16 or float16.
        means: `[slots / 16, G, D]`, in the dtype of `k`, to write into.
        table: `[B, M]`, int32: the cache pages of each request in order, of `table_page` slots each. With `starts` one
            list of them all, `[T]`.
        lengths: `[B]`, int32: tokens in the cache, the newest one included.
        table_page: slots of a page of `table`.
        starts: `[B]`, int32: where each request begins in a table that is a list.
        newest: write only the groups that the newest tokens complete.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes that on CUDA.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    _check_rows(k, means)
    check_table(table, lengths, starts)
    expect_one_device(k, means, table, lengths, starts)
    if len(means) * GROUP < len(k) // GROUP * GROUP or means.shape[1:] != k.shape[1:] or means.dtype != k.dtype:
        raise KernelInputError(
            f"means are {list(means.shape)} of {means.dtype}, expected a row for {GROUP} of {list(k.shape)} {k.dtype}"
        )
    if runs_triton(backend, k):
        from indexcache_dense.kernels.compressed_keys import triton

        triton.update_means(k, means, table, lengths, table_page, starts, newest)
    else:
        naive.update_means(k, means, table, lengths, table_page, starts, newest)


def compressed_scores(
    q: Tensor,
    means: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    budget: PageBudget,
    table_page: int = 1,
    starts: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
    memory: StepMemory | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Score pages by the shares that a decode step's queries give compressed keys: the rule `compressed_keys`.

    It is InfLLM-V2's and NOSA's (arXiv 2510.13602), as in `block_scores`; a compressed key is made of two means where
    it is read. Shapes are static, so a CUDA graph can capture the call.

    Args:
        q: `[B, H, D]`, the queries of the step: float32, bfloat16 or float16; head h uses key head h // (H / G).
        means: `[rows, G, D]` in the dtype of `q`, see `update_means`.
        table: `[B, M]`, int32, as there.
        lengths: `[B]`, int32, as there.
        scale: what products of queries and keys are multiplied by.
        budget: sizes; pages of a multiple of 16 tokens.
        table_page: slots of a page of `table`; divides `budget.page_tokens`.
        starts: as there; `out` must be given then.
        out: `[B, N]`, float32, N the most pages that a request can have; allocated if not given.
        splits: programs a request and key head, a power of two; chosen by the batch if not given.
        memory: of the steps before; requests whose step takes held pages are left out.
        backend: as there.

    Returns:
        `out`. Only the live pages of requests that exceed the budget are written: others take all of theirs.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    _check_rows(means, means)
    pages = CachedPages(table, lengths, starts, table_page, budget)
    batch, most = pages.check("out", out)
    if (
        q.ndim != 3
        or q.shape[0] != batch
        or q.shape[2] != means.shape[2]
        or not share_evenly(q.shape[1], means.shape[1])
    ):
        raise KernelInputError(
            f"q is {list(q.shape)} and means {list(means.shape)}, expected [{batch}, H, D] and [rows, G, D]"
        )
    if q.dtype != means.dtype:
        raise KernelInputError(f"q is {q.dtype} and means {means.dtype}, expected one dtype")
    if budget.page_tokens % GROUP:
        raise KernelInputError(f"page_tokens is {budget.page_tokens}, expected a multiple of {GROUP}")
    if out is None:
        out = torch.empty(batch, most, dtype=torch.float32, device=q.device)
    expect("out", out, (batch, most), torch.float32)
    expect_one_device(q, means, table, lengths, starts, out)
    if memory is not None:
        memory.check(batch, most, q)
    if runs_triton(backend, q):
        from indexcache_dense.kernels.compressed_keys import triton

        triton.compressed_scores(q.contiguous(), means, pages, scale=scale, out=out, splits=splits, memory=memory)
    else:
        naive.compressed_scores(q, means, pages, scale=scale, out=out, memory=memory)
    return out


def _check_rows(k: Tensor, means: Tensor) -> None:
    """Check how keys and means lie in memory."""
    if k.ndim != 3 or k.stride(2) != 1 or not means.is_contiguous():
        raise KernelInputError(
            f"keys are {list(k.shape)} and means {list(means.shape)}, expected [slots, G, D], dimensions side by side"
        )
