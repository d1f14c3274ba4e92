"""The pages of a request's cache that the next token attends to, by the attention of a layer that saw all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_dense.kernels.page_selection import naive
from indexcache_dense.kernels.page_selection.memory import StepMemory
from indexcache_dense.kernels.pages import CachedPages, PageBudget
from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect, share_evenly

__all__ = ["StepMemory", "page_scores", "select_pages"]


def page_scores(
    q: Tensor,
    k: Tensor,
    pages: CachedPages,
    *,
    lse: Tensor,
    scale: float,
    budget: PageBudget,
    out: Tensor | None = None,
    splits: int | None = None,
    memory: StepMemory | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Score pages by the attention of a decode step: sum over tokens the largest share that any head gives each.

    This is the rule `token_max` of DELTA (arXiv 2510.09883), from the keys and the logarithm of the attention's
    denominator, so that no `[B, H, L]` is written.

    Args:
        q: `[B, H, D]`, the queries of the step: float32, bfloat16 or float16.
        k: `[slots, G, D]`, the layer's key cache in the dtype of `q`; head h uses key head h // (H / G).
        pages: where the tokens lie.
        lse: `[B, H]`, float32: logarithm of the attention's denominator.
        scale: what products of `q` and `k` are multiplied by.
        budget: sizes; `pages.table_page` divides `page_tokens`.
        out: `[B, N]`, float32, N the most pages that a request can have; allocated if not given, which takes a table
            with rows. Static shapes let a CUDA graph capture the call.
        splits: programs a request; chosen by the batch if not given. Scores do not depend on it.
        memory: of the steps before; requests whose step takes held pages are left out.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes that on CUDA.

    Returns:
        `out`. Only the live pages of requests that exceed the budget are written: others take all of theirs.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together.
    """
    batch = pages.batch
    out = pages.room_for_scores(budget, out)
    fits = q.ndim == k.ndim == 3 and q.shape[0] == batch and q.shape[2] == k.shape[2]
    if not fits or not share_evenly(q.shape[1], k.shape[1]):
        raise KernelInputError(
            f"q is {list(q.shape)} and k {list(k.shape)}, expected [{batch}, H, D] and [slots, G, D], H a multiple of G"
        )
    if q.dtype != k.dtype or k.stride(2) != 1:
        raise KernelInputError(f"q is {q.dtype} and k {k.dtype}, expected one dtype, and dimensions side by side")
    expect("lse", lse, (batch, q.shape[1]), torch.float32)
    pages.expect_beside(q, k, lse, out)
    if memory is not None:
        memory.check(batch, out.shape[1], q)
    if runs_triton(backend, q):
        from indexcache_dense.kernels.page_selection import triton

        splits = splits or max(1, 256 // max(1, batch))  # enough for a large GPU at batch 1, few at large batches
        triton.page_scores(
            q.contiguous(),
            k,
            pages,
            lse=lse.contiguous(),
            scale=scale,
            budget=budget,
            out=out,
            splits=splits,
            memory=memory,
        )
    else:
        naive.page_scores(q, k, pages, lse=lse, scale=scale, budget=budget, out=out, memory=memory)
    return out


def select_pages(
    scores: Tensor,
    pages: CachedPages,
    *,
    budget: PageBudget,
    out_table: Tensor | None = None,
    out_starts: Tensor | None = None,
    out_lengths: Tensor | None = None,
    memory: StepMemory | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Select sinks, the pages with the highest scores and the most recent ones: their page table, ascending.

    Exact and deterministic: of equal scores the lower page wins. A request within the budget keeps its own table.

    Args:
        scores: `[B, N]`, float32, at least 0: what `page_scores` gave.
        pages: as there.
        budget: as there.
        out_table: `[B, budget.pages * page_tokens / table_page]`, int32; allocated if not given.
        out_starts: `[B]`, int32: where each request begins in an `out_table` that is one list, `[T]`.
        out_lengths: `[B]`, int32; allocated if not given.
        memory: of the steps before, which decides with; it is written, so call this once a step.
        backend: as for `page_scores`.

    Returns:
        `out_table`, whose entries behind the selected tokens are not written, and `out_lengths`, tokens selected.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together.
    """
    batch, most = pages.check_scores(budget, "scores", scores)
    width = budget.pages * budget.page_tokens // pages.table_page
    if out_table is None:
        out_table = torch.empty(batch, width, dtype=torch.int32, device=scores.device)
    if out_lengths is None:
        out_lengths = torch.empty(batch, dtype=torch.int32, device=scores.device)
    if out_starts is None:
        expect("out_table", out_table, (batch, width), torch.int32)
    else:
        expect("out_starts", out_starts, (batch,), torch.int32)
        expect("out_table", out_table, (out_table.numel(),), torch.int32)
    expect("out_lengths", out_lengths, (batch,), torch.int32)
    pages.expect_beside(scores, out_table, out_starts, out_lengths)
    if memory is not None:
        memory.check(batch, most, scores)
    if runs_triton(backend, scores):
        from indexcache_dense.kernels.page_selection import triton

        triton.select_pages(scores, pages, budget, out_table, out_starts, out_lengths, memory)
    else:
        naive.select_pages(scores, pages, budget, out_table, out_starts, out_lengths, memory)
    return out_table, out_lengths
