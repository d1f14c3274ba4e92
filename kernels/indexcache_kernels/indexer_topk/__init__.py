"""Lightning-indexer scores and the exact top-k of each query, without the `[T, L]` scores."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect, expect_one_device
from indexcache_kernels.indexer_topk import naive

MOST = 8192  # to find with Triton: twice as many candidates are counted in 15 bits
KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Select the `topk` keys that score highest for each query.

    The score is the sum over heads of weight x ReLU(q . k) x k_scale. Deterministic: of equal scores the lower
    indices are taken. Scores must not be NaN.

    Args:
        q: `[T, I, C]`, in the dtype of `k`. Scales of quantised queries belong into `weights`.
        k: `[L, C]`: float32, bfloat16, float16 or float8_e4m3fn.
        weights: `[T, I]`, float32; softmax scale and scales of `q` included.
        starts: `[T]`, int32, the first key that a query sees; see `causal_ranges`.
        ends: `[T]`, int32, one past the last.
        topk: keys of a query; at most 8192 with `triton`.
        k_scale: `[L]`, float32, of the rows of a quantised `k`.
        backend: `naive` is PyTorch with dense scores, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes
            that on CUDA.

    Returns:
        `[T, K]`, int32: rows of `k`, ascending; -1 behind them where a query sees fewer.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them.
    """
    _check_inputs(q, k, weights, starts, ends, topk, k_scale)
    if not runs_triton(backend, q):
        return naive.indexer_topk(q, k, weights, starts=starts, ends=ends, topk=topk, k_scale=k_scale)
    if topk > MOST:
        raise KernelInputError(f"topk is {topk}, expected at most {MOST} with backend triton")
    from indexcache_kernels.indexer_topk import triton

    return triton.indexer_topk(
        q.contiguous(),
        k.contiguous(),
        weights.contiguous(),
        starts=starts.contiguous(),
        ends=ends.contiguous(),
        topk=topk,
        k_scale=None if k_scale is None else k_scale.contiguous(),
    )


def causal_ranges(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return first key and one past the last of each query, for sequences one behind the other that see their past.

    Args:
        cu_seqlens: `[sequences + 1]`, where sequences begin, and the end of the last.

    Returns:
        Two tensors `[T]`, int32.
    """
    lengths = cu_seqlens.diff()
    starts = torch.repeat_interleave(cu_seqlens[:-1], lengths).int()
    return starts, torch.arange(1, len(starts) + 1, dtype=torch.int32, device=starts.device)


def _check_inputs(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, k_scale: Tensor | None
) -> None:
    if q.ndim != 3 or k.ndim != 2 or q.shape[2] != k.shape[1]:
        raise KernelInputError(f"q is {list(q.shape)} and k {list(k.shape)}, expected [T, I, C] and [L, C]")
    if q.dtype != k.dtype or k.dtype not in KEY_DTYPES:
        raise KernelInputError(f"q is {q.dtype} and k {k.dtype}, expected the same one of {KEY_DTYPES}")
    expect("weights", weights, tuple(q.shape[:2]), torch.float32)
    expect("starts", starts, (len(q),), torch.int32)
    expect("ends", ends, (len(q),), torch.int32)
    if k_scale is not None:
        expect("k_scale", k_scale, (len(k),), torch.float32)
    expect_one_device(q, k, weights, starts, ends, k_scale)
    if topk < 1:
        raise KernelInputError(f"topk is {topk}, expected at least 1")
