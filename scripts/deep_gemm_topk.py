"""What indexer_topk is measured against: DeepGEMM's scores followed by SGLang's selection, float8 keys only."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

TOPK, DIM, HEADS = 2048, 128, (32, 64)  # what they were written for
WORKSPACE = 1 << 30  # bytes of scores that exist at a time


@cache
def _libraries() -> Any:
    """DeepGEMM and sgl_kernel, None where one is not installed."""
    try:
        import deep_gemm
        import sgl_kernel
    except (ImportError, OSError, RuntimeError):
        return None
    return deep_gemm, sgl_kernel


def fits(q: Tensor, topk: int, k_scale: Tensor | None) -> bool:
    """Whether they can run: float8 with scales, 2048 of keys of 128 dimensions, 32 or 64 heads, on a Hopper device."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9 or _libraries() is None:
        return False
    quantised = q.dtype == torch.float8_e4m3fn and k_scale is not None
    return quantised and topk == TOPK and q.shape[2] == DIM and q.shape[1] in HEADS


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    k_scale: Tensor,
    rows: int | None = None,
) -> Tensor:
    """As `indexcache_kernels.indexer_topk`, but any of equal scores is taken, and the order is no particular one.

    `rows` says of how many queries scores exist at a time; the default is as many as fit into a gigabyte.
    """
    deep_gemm, sgl_kernel = _libraries()
    found = torch.empty((len(q), TOPK), dtype=torch.int32, device=q.device)
    rows = rows or max(1, WORKSPACE // (4 * len(k)))
    for first in range(0, len(q), rows):
        part = slice(first, first + rows)
        start, end = starts[part], ends[part]
        logits = deep_gemm.fp8_mqa_logits(q[part], (k, k_scale), weights[part], start, end, clean_logits=False)
        chosen = sgl_kernel.fast_topk_v2(logits, end - start, TOPK, row_starts=start)
        found[part] = torch.where(chosen < 0, chosen, chosen + start[:, None])
    return found
