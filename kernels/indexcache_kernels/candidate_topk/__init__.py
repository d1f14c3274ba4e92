"""The exact top-k of each query among candidates of its own: lightning-indexer scores of gathered keys."""

from __future__ import annotations

from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.candidate_topk import naive
from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.indexer_topk import check_inputs

MOST = 16384  # candidates of a query with Triton: twice as many are counted in 15 bits


def candidate_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    candidates: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The `topk` candidates that score highest for each query: score as of `indexer_topk`.

    Deterministic: of equal scores the first candidates are taken. Scores must not be NaN. Nothing waits for the host,
    and shapes of what is computed depend on shapes alone, so it runs in CUDA graphs.

    Args:
        q: `[T, I, C]`, in the dtype of `k`. Scales of quantised queries belong into `weights`.
        k: `[L, C]`: float32, bfloat16, float16 or float8_e4m3fn.
        weights: `[T, I]`, float32; softmax scale and scales of `q` included.
        candidates: `[T, N]`, int32, rows of `k`, each once, ascending, -1 behind them; as `indexer_topk` gives them.
        topk: keys of a query.
        k_scale: `[L]`, float32, of the rows of a quantised `k`.
        backend: as of `indexer_topk`; `triton` takes at most 16,384 candidates, `auto` leaves more to `naive`.

    Returns:
        `[T, K]`, int32: rows of `k`, ascending; -1 behind them where a query has fewer candidates.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them.
    """
    if candidates.ndim != 2 or len(candidates) != len(q):
        raise KernelInputError(f"candidates is {list(candidates.shape)}, expected [{len(q)}, N]")
    check_inputs(q, k, weights, topk, k_scale, candidates=(candidates, tuple(candidates.shape)))
    fits = max(topk, candidates.shape[1]) <= MOST
    if not runs_triton(backend, q) or (backend == "auto" and not fits):
        return naive.candidate_topk(q, k, weights, candidates=candidates, topk=topk, k_scale=k_scale)
    if not fits:
        raise KernelInputError(
            f"topk is {topk} of {candidates.shape[1]} candidates, expected at most {MOST} with backend triton"
        )
    from indexcache_kernels.candidate_topk import triton

    return triton.candidate_topk(
        q.contiguous(),
        k.contiguous(),
        weights.contiguous(),
        candidates=candidates.contiguous(),
        topk=topk,
        k_scale=None if k_scale is None else k_scale.contiguous(),
    )
