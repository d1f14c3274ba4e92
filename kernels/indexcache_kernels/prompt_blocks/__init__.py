"""Selecting for blocks of neighbouring prompt queries: what a server does beside scores and top-k, in three kernels.

A row is a block, whose first query stands at row `first` of the pass, or a query that selects for itself. Rows know how
many queries they have (`sizes`); a block of Q gives up Q of its K keys for its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect, expect_one_device
from indexcache_kernels.prompt_blocks import naive


@dataclass(frozen=True)
class IndexSpace:
    """How positions of a request become what attention reads: nothing is done without either.

    Attributes:
        offsets: `[R]`, int32: what is added to the positions of each row.
        pages: `[requests, pages]`, int32: the page of the cache with each `page_size` tokens of a request.
        requests: `[R]`, int32: the request of each row, for `pages`.
        page_size: tokens of a page.
    """

    offsets: Tensor | None = None
    pages: Tensor | None = None
    requests: Tensor | None = None
    page_size: int = 1


def mean_queries(
    q: Tensor, gates: Tensor, first: Tensor, sizes: Tensor, *, ranks: int = 1, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Take the mean of the queries of each row, in float32, and of their gates.

    With several `ranks`, query i of the pass is number i // `ranks` of those of rank i mod `ranks`, and the queries of
    a rank lie one behind the other.

    Args:
        q: `[T, H, D]`, contiguous in its heads; float8_e4m3fn, bfloat16 or float32.
        gates: `[T, H, 1]`, contiguous in its heads, float32.
        first: `[R]`, int32: the first query of each row.
        sizes: `[R]`, int32: its number of queries.
        ranks: number of ranks, which divides T.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes that on CUDA.

    Returns:
        `[R, H, D]` in the dtype of `q`, and `[R, H, 1]`, float32.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them.
    """
    expect("gates", gates, (*q.shape[:2], 1), torch.float32)
    _expect_rows(first=first, sizes=sizes)
    expect_one_device(q, gates, first, sizes)
    if not (q[:1].is_contiguous() and gates[:1].is_contiguous()):
        raise KernelInputError("the heads of q or gates are not contiguous")
    if ranks < 1 or len(q) % ranks:
        raise KernelInputError(f"q is {list(q.shape)}, expected as many queries of each of {ranks} ranks")
    if runs_triton(backend, q):
        from indexcache_kernels.prompt_blocks.triton import mean_queries as run

        return run(q, gates, first, sizes, ranks)
    return naive.mean_queries(q, gates, first, sizes, ranks)


def lowest_last(scores: Tensor, chosen: Tensor, starts: Tensor, counts: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Move the keys with the lowest scores to the end of each row, and keep the others in their order.

    Args:
        scores: `[R, N]`, float32, contiguous in its columns.
        chosen: `[R, K]`, int32: keys, `starts` less than their columns in `scores`; -1 for none, which are the lowest.
        starts: `[R]`, int32.
        counts: `[R]`, int32: how many keys of each row are moved.
        backend: as of `mean_queries`.

    Returns:
        `[R, K]`, int32. Of equal scores, later ones are the lower.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them.
    """
    _expect_rows(starts=starts, counts=counts)
    expect("chosen", chosen, (len(starts), chosen.shape[1]), torch.int32)
    expect("scores", scores, (len(starts), scores.shape[1]), torch.float32)
    if not scores.shape[1] and chosen.numel():
        raise KernelInputError(f"scores is {list(scores.shape)}, expected a column for each key")
    expect_one_device(scores, chosen, starts, counts)
    if runs_triton(backend, scores):
        from indexcache_kernels.prompt_blocks.triton import lowest_last as run

        return run(scores, chosen, starts, counts)
    return naive.lowest_last(scores, chosen, starts, counts)


def expand_blocks(
    chosen: Tensor,
    first: Tensor,
    sizes: Tensor,
    begins: Tensor,
    space: IndexSpace,
    result: Tensor,
    *,
    rank: int = 0,
    ranks: int = 1,
    backend: Backend = "auto",
) -> None:
    """Write what each query attends to: the keys of its row, then its block up to itself, then -1.

    With several `ranks`, query i of the pass is on rank i mod `ranks`, and only those of `rank` are written.

    Args:
        chosen: `[R, K]`, int32: positions, -1 for none; of a block of Q queries the last Q are left out.
        first: `[R]`, int32: the first query of each row.
        sizes: `[R]`, int32: its number of queries; with 1 all keys are its.
        begins: `[R]`, int32: position of the first query, for blocks.
        space: what is written instead of positions.
        result: `[T, K]`, int32, contiguous: the queries of this rank; written where a row has a query.
        rank: whose queries are written.
        ranks: number of ranks.
        backend: as of `mean_queries`.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them.
    """
    _expect_rows(first=first, sizes=sizes, begins=begins)
    expect("chosen", chosen, (len(first), chosen.shape[1]), torch.int32)
    expect("result", result, (len(result), chosen.shape[1]), torch.int32)
    if space.pages is not None and not space.pages.numel() and chosen.numel():
        raise KernelInputError(f"pages is {list(space.pages.shape)}, expected a page for each request")
    if not result.is_contiguous():
        raise KernelInputError("result is not contiguous")
    if not 0 <= rank < ranks:
        raise KernelInputError(f"rank is {rank} of {ranks}, expected one of them")
    expect_one_device(chosen, first, sizes, begins, result, space.offsets, space.pages, space.requests)
    if runs_triton(backend, result):
        from indexcache_kernels.prompt_blocks.triton import expand_blocks as run

        run(chosen.contiguous(), first, sizes, begins, space, result, rank=rank, ranks=ranks)
    else:
        naive.expand_blocks(chosen, first, sizes, begins, space, result, rank=rank, ranks=ranks)


def _expect_rows(**tensors: Tensor) -> None:
    rows = len(next(iter(tensors.values())))
    for name, tensor in tensors.items():
        expect(name, tensor, (rows,), torch.int32)
