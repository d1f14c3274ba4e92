"""The exact top-k of each query among candidates of its own: lightning-indexer scores of gathered keys."""

from __future__ import annotations

from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.candidate_topk import naive
from indexcache_kernels.candidate_topk.pages import Pages
from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.indexer_topk import check_inputs

__all__ = ["Pages", "candidate_topk"]

MOST = 16384  # candidates of a query with Triton: twice as many are counted in 15 bits


def candidate_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    candidates: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
    pages: Pages | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The `topk` candidates that score highest for each query: score as of `indexer_topk`.

    Deterministic: of equal scores the first candidates are taken. Scores must not be NaN. Nothing waits for the host,
    and shapes of what is computed depend on shapes alone, so it runs in CUDA graphs.

    Args:
        q: `[T, I, C]`, in the dtype of `k`. Scales of quantised queries belong into `weights`.
        k: `[L, C]`: float32, bfloat16, float16 or float8_e4m3fn. With `pages` `[P, S, C]`, pages of S keys, which may
            have something between them.
        weights: `[T, I]`, float32; softmax scale and scales of `q` included.
        candidates: `[T, N]`, int32, rows of `k`, each once, ascending, -1 behind them; as `indexer_topk` gives them.
            With `pages` positions in the query's request.
        topk: keys of a query.
        k_scale: `[L]`, float32, of the rows of a quantised `k`; with `pages` `[P, S]`.
        pages: where the positions of each request are, for a `k` in pages.
        backend: as of `indexer_topk`; `triton` takes at most 16,384 candidates, `auto` leaves more to `naive`.

    Returns:
        `[T, K]`, int32: candidates, ascending; -1 behind them where a query has fewer candidates.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them.
    """
    if candidates.ndim != 2 or len(candidates) != len(q):
        raise KernelInputError(f"candidates is {list(candidates.shape)}, expected [{len(q)}, N]")
    indices = {"candidates": (candidates, tuple(candidates.shape))}
    first_k, first_scale = k, k_scale
    if pages is not None:
        if k.ndim != 3 or k.stride()[1:] != (k.shape[2], 1):
            raise KernelInputError(f"k is {list(k.shape)}, expected [P, S, C] with pages, each of them contiguous")
        if k_scale is not None and (k_scale.shape != k.shape[:2] or k_scale.stride(1) != 1):
            raise KernelInputError(f"k_scale is {list(k_scale.shape)}, expected {list(k.shape[:2])}, as k with pages")
        if pages.table.ndim != 2:
            raise KernelInputError(f"pages.table is {list(pages.table.shape)}, expected [R, pages]")
        indices |= {
            "pages.table": (pages.table, tuple(pages.table.shape)),
            "pages.requests": (pages.requests, (len(q),)),
        }
        first_k, first_scale = k[:, 0], None if k_scale is None else k_scale[:, 0]
    check_inputs(q, first_k, weights, topk, first_scale, **indices)
    fits = max(topk, candidates.shape[1]) <= MOST
    if not runs_triton(backend, q) or (backend == "auto" and not fits):
        return naive.candidate_topk(q, k, weights, candidates=candidates, topk=topk, k_scale=k_scale, pages=pages)
    if not fits:
        raise KernelInputError(
            f"topk is {topk} of {candidates.shape[1]} candidates, expected at most {MOST} with backend triton"
        )
    from indexcache_kernels.candidate_topk import triton

    return triton.candidate_topk(
        q.contiguous(),
        k.contiguous() if pages is None else k,
        weights.contiguous(),
        candidates=candidates.contiguous(),
        topk=topk,
        k_scale=k_scale.contiguous() if k_scale is not None and pages is None else k_scale,
        pages=pages,
    )
