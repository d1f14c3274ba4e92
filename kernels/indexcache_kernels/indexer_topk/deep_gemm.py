"""DeepGEMM's scores, where it is installed, a few hundred queries at a time: its products are faster than Triton's."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

DIM, HEADS = 128, (32, 64)  # what it was written for
ROWS = 528  # queries whose scores exist at a time: four for each of 132 multiprocessors
LEAST = 1056  # queries; fewer are as fast without


@cache
def _library() -> Any:
    """deep_gemm, None where it is not installed or was built for other devices."""
    try:
        import deep_gemm
    except (ImportError, OSError, RuntimeError):
        return None
    return deep_gemm if hasattr(deep_gemm, "fp8_mqa_logits") else None


def fits(q: Tensor, k: Tensor, k_scale: Tensor | None) -> bool:
    """Whether it can run and pays: many queries of 32 or 64 heads, scaled float8 keys of 128 dimensions, on Hopper."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9 or k_scale is None:
        return False
    shape = len(q) >= LEAST and q.shape[1] in HEADS and k.shape[1] == DIM
    return shape and k.dtype == torch.float8_e4m3fn and _library() is not None


def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, *, starts: Tensor, ends: Tensor, topk: int, k_scale: Tensor | None
) -> Tensor:
    """See `indexcache_kernels.indexer_topk`; scores are rounded as DeepGEMM's are."""
    from indexcache_kernels.indexer_topk import scored

    selected = torch.empty((len(q), topk), dtype=torch.int32, device=q.device)
    for first in range(0, len(q), ROWS):
        part = slice(first, first + ROWS)
        start, end = starts[part], ends[part]
        scores = _library().fp8_mqa_logits(q[part], (k, k_scale), weights[part], start, end, clean_logits=False)
        scored.select(scores, start, end, selected[part])
    return selected
