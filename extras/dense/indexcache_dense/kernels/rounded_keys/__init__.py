"""Scores of cached pages by keys in 4 bits, which lie beside a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_dense.kernels.page_selection import PageBudget, StepMemory
from indexcache_dense.kernels.page_selection.pages import CachedPages, check_table
from indexcache_dense.kernels.rounded_keys import naive
from indexcache_dense.kernels.rounded_keys.naive import RoundedKeys
from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect, expect_one_device, share_evenly

__all__ = ["RoundedKeys", "round_keys", "rounded_scores"]


def round_keys(
    k: Tensor,
    rounded: RoundedKeys,
    table: Tensor,
    lengths: Tensor,
    *,
    table_page: int = 1,
    starts: Tensor | None = None,
    newest: bool = False,
    backend: Backend = "auto",
) -> None:
    """Write each key of requests in 4 bits a dimension, where the key lies: slot i has row i of its key head.

    A key is rounded to one of 16 levels, evenly between its smallest and its largest dimension. It depends on no other
    key, so requests that share slots share rounded keys.

    Args:
        k: `[slots, G, D]`, a layer's key cache: float32, bfloat16 or float16; D is even.
        rounded: for as many slots, to write into.
        table: `[B, M]`, int32: the cache pages of each request in order, of `table_page` slots each. With `starts` one
            list of them all, `[T]`.
        lengths: `[B]`, int32: tokens in the cache, the newest one included.
        table_page: slots of a page of `table`.
        starts: `[B]`, int32: where each request begins in a table that is a list.
        newest: write the newest token of each request alone.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes that on CUDA.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    check_table(table, lengths, starts)
    if k.ndim != 3 or k.stride(2) != 1 or k.shape[2] % 2 or not k.shape[2]:
        raise KernelInputError(f"k is {list(k.shape)}, expected [slots, G, D] with an even D, dimensions side by side")
    _check_rounded(rounded, k.shape[0], k.shape[1], k.shape[2])
    expect_one_device(k, *rounded, table, lengths, starts)
    if runs_triton(backend, k):
        from indexcache_dense.kernels.rounded_keys import triton

        triton.round_keys(k, rounded, table, lengths, table_page, starts, newest)
    else:
        naive.round_keys(k, rounded, table, lengths, table_page, starts, newest)


def rounded_scores(
    q: Tensor,
    rounded: RoundedKeys,
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
    """Score pages by the attention that heads would give them over rounded keys.

    It is the rule `rounded_keys`: the largest share of a head, summed over key heads. Shapes are static, so a CUDA
    graph can capture the call.

    Args:
        q: `[B, H, D]`, the queries of the step: float32, bfloat16 or float16; head h uses key head h // (H / G).
        rounded: what `round_keys` wrote.
        table: `[B, M]`, int32, as there.
        lengths: `[B]`, int32, as there.
        scale: what products of queries and keys are multiplied by.
        budget: sizes.
        table_page: slots of a page of `table`; divides `budget.page_tokens`.
        starts: as there; `out` must be given then.
        out: `[B, N]`, float32, N the most pages that a request can have; allocated if not given.
        splits: programs a request and key head; chosen by the batch if not given.
        memory: of the steps before; requests whose step takes held pages are left out.
        backend: as there.

    Returns:
        `out`. Only the live pages of requests that exceed the budget are written: others take all of theirs.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    pages = CachedPages(table, lengths, starts, table_page, budget)
    batch, most = pages.check("out", out)
    kv_heads, slots, half = rounded.codes.shape
    if q.ndim != 3 or q.shape[0] != batch or q.shape[2] != 2 * half or not share_evenly(q.shape[1], kv_heads):
        raise KernelInputError(
            f"q is {list(q.shape)} and codes {list(rounded.codes.shape)}, expected [{batch}, H, D] and"
            " [G, slots, D / 2]"
        )
    _check_rounded(rounded, slots, kv_heads, 2 * half)
    if out is None:
        out = torch.empty(batch, most, dtype=torch.float32, device=q.device)
    expect("out", out, (batch, most), torch.float32)
    expect_one_device(q, *rounded, table, lengths, starts, out)
    if memory is not None:
        memory.check(batch, most, q)
    if runs_triton(backend, q):
        from indexcache_dense.kernels.rounded_keys import triton

        triton.rounded_scores(q.contiguous(), rounded, pages, scale=scale, out=out, splits=splits, memory=memory)
    else:
        naive.rounded_scores(q, rounded, pages, scale=scale, out=out, memory=memory)
    return out


def _check_rounded(rounded: RoundedKeys, slots: int, heads: int, dim: int) -> None:
    """Check what holds rounded keys."""
    expect("codes", rounded.codes, (heads, slots, dim // 2), torch.uint8)
    expect("ranges", rounded.ranges, (heads, slots, 2), torch.float16)
    if not rounded.codes.is_contiguous() or not rounded.ranges.is_contiguous():
        raise KernelInputError("codes or ranges have strides of their own, expected contiguous tensors")
