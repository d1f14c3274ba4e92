"""Scores of cached pages by keys in 4 bits, which lie beside a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_dense.kernels.page_selection import StepMemory
from indexcache_dense.kernels.pages import CachedPages, PageBudget
from indexcache_dense.kernels.rounded_keys import naive
from indexcache_dense.kernels.rounded_keys.naive import RoundedKeys
from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect, share_evenly

__all__ = ["RoundedKeys", "round_keys", "rounded_scores"]


def round_keys(
    k: Tensor,
    rounded: RoundedKeys,
    pages: CachedPages,
    *,
    newest: bool = False,
    backend: Backend = "auto",
) -> None:
    """Write each key of requests in 4 bits a dimension, where the key lies: slot i has row i of its key head.

    A key is rounded to one of 16 levels, evenly between its smallest and its largest dimension. It depends on no other
    key, so requests that share slots share rounded keys.

    Args:
        k: `[slots, G, D]`, a layer's key cache: float32, bfloat16 or float16; D is even.
        rounded: for as many slots, to write into.
        pages: where the tokens lie.
        newest: write the newest token of each request alone.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes that on CUDA.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together.
    """
    if k.ndim != 3 or k.stride(2) != 1 or k.shape[2] % 2 or not k.shape[2]:
        raise KernelInputError(f"k is {list(k.shape)}, expected [slots, G, D] with an even D, dimensions side by side")
    _check_rounded(rounded, k.shape[0], k.shape[1], k.shape[2])
    pages.expect_beside(k, *rounded)
    if runs_triton(backend, k):
        from indexcache_dense.kernels.rounded_keys import triton

        triton.round_keys(k, rounded, pages, newest)
    else:
        naive.round_keys(k, rounded, pages, newest)


def rounded_scores(
    q: Tensor,
    rounded: RoundedKeys,
    pages: CachedPages,
    *,
    scale: float,
    budget: PageBudget,
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
        pages: where the tokens lie.
        scale: what products of queries and keys are multiplied by.
        budget: sizes; `pages.table_page` divides `page_tokens`.
        out: `[B, N]`, float32, N the most pages that a request can have; allocated if not given, which takes a table
            with rows.
        splits: programs a request and key head; chosen by the batch if not given.
        memory: of the steps before; requests whose step takes held pages are left out.
        backend: as there.

    Returns:
        `out`. Only the live pages of requests that exceed the budget are written: others take all of theirs.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together.
    """
    batch = pages.batch
    out = pages.room_for_scores(budget, out)
    kv_heads, slots, half = rounded.codes.shape
    if q.ndim != 3 or q.shape[0] != batch or q.shape[2] != 2 * half or not share_evenly(q.shape[1], kv_heads):
        raise KernelInputError(
            f"q is {list(q.shape)} and codes {list(rounded.codes.shape)}, expected [{batch}, H, D] and"
            " [G, slots, D / 2]"
        )
    _check_rounded(rounded, slots, kv_heads, 2 * half)
    pages.expect_beside(q, *rounded, out)
    if memory is not None:
        memory.check(batch, out.shape[1], q)
    if runs_triton(backend, q):
        from indexcache_dense.kernels.rounded_keys import triton

        triton.rounded_scores(
            q.contiguous(), rounded, pages, scale=scale, budget=budget, out=out, splits=splits, memory=memory
        )
    else:
        naive.rounded_scores(q, rounded, pages, scale=scale, budget=budget, out=out, memory=memory)
    return out


def _check_rounded(rounded: RoundedKeys, slots: int, heads: int, dim: int) -> None:
    """Check what holds rounded keys."""
    expect("codes", rounded.codes, (heads, slots, dim // 2), torch.uint8)
    expect("ranges", rounded.ranges, (heads, slots, 2), torch.float16)
    if not rounded.codes.is_contiguous() or not rounded.ranges.is_contiguous():
        raise KernelInputError("codes or ranges have strides of their own, expected contiguous tensors")
