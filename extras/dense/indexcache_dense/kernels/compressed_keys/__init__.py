"""Scores of cached pages by compressed keys, from means that lie beside a paged cache."""

from __future__ import annotations

from torch import Tensor

from indexcache_dense.kernels.compressed_keys import naive
from indexcache_dense.kernels.compressed_keys.naive import GROUP
from indexcache_dense.kernels.page_selection import StepMemory
from indexcache_dense.kernels.pages import CachedPages, PageBudget
from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, share_evenly

__all__ = ["GROUP", "compressed_scores", "update_means"]


def update_means(
    k: Tensor,
    means: Tensor,
    pages: CachedPages,
    *,
    newest: bool = False,
    backend: Backend = "auto",
) -> None:
    """Write the mean key of each complete group of 16 tokens.

    A group's mean lies where its keys do: the keys of slots 16 i to 16 i + 15 have row i. So a group must fill such
    slots, which a cache with pages of a multiple of 16 slots sees to, and requests that share pages share means.

    Args:
        k: `[slots, G, D]`, a layer's key cache: float32, bfloat16 or float16.
        means: `[slots / 16, G, D]`, in the dtype of `k`, to write into.
        pages: where the tokens lie.
        newest: write only the groups that the newest tokens complete.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes that on CUDA.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together.
    """
    _check_rows(k, means)
    pages.expect_beside(k, means)
    if len(means) * GROUP < len(k) // GROUP * GROUP or means.shape[1:] != k.shape[1:] or means.dtype != k.dtype:
        raise KernelInputError(
            f"means are {list(means.shape)} of {means.dtype}, expected a row for {GROUP} of {list(k.shape)} {k.dtype}"
        )
    if runs_triton(backend, k):
        from indexcache_dense.kernels.compressed_keys import triton

        triton.update_means(k, means, pages, newest)
    else:
        naive.update_means(k, means, pages, newest)


def compressed_scores(
    q: Tensor,
    means: Tensor,
    pages: CachedPages,
    *,
    scale: float,
    budget: PageBudget,
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
        pages: where the tokens lie.
        scale: what products of queries and keys are multiplied by.
        budget: sizes; `pages.table_page` divides `page_tokens`, a multiple of 16.
        out: `[B, N]`, float32, N the most pages that a request can have; allocated if not given, which takes a table
            with rows.
        splits: programs a request and key head, a power of two; chosen by the batch if not given.
        memory: of the steps before; requests whose step takes held pages are left out.
        backend: as there.

    Returns:
        `out`. Only the live pages of requests that exceed the budget are written: others take all of theirs.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together.
    """
    _check_rows(means, means)
    batch = pages.batch
    out = pages.room_for_scores(budget, out)
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
    pages.expect_beside(q, means, out)
    if memory is not None:
        memory.check(batch, out.shape[1], q)
    if runs_triton(backend, q):
        from indexcache_dense.kernels.compressed_keys import triton

        triton.compressed_scores(
            q.contiguous(), means, pages, scale=scale, budget=budget, out=out, splits=splits, memory=memory
        )
    else:
        naive.compressed_scores(q, means, pages, scale=scale, budget=budget, out=out, memory=memory)
    return out


def _check_rows(k: Tensor, means: Tensor) -> None:
    """Check how keys and means lie in memory."""
    if k.ndim != 3 or k.stride(2) != 1 or not means.is_contiguous():
        raise KernelInputError(
            f"keys are {list(k.shape)} and means {list(means.shape)}, expected [slots, G, D], dimensions side by side"
        )
