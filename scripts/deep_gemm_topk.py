"""What indexer_topk is measured against: DeepGEMM's scores followed by SGLang's selection, float8 keys only."""

from __future__ import annotations

import torch
from torch import Tensor

TOPK = 2048  # what fast_topk was written for


def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, k_scale: Tensor, rows: int
) -> Tensor:
    """As `indexcache_kernels.indexer_topk`, but in no particular order, and not exact: fast_topk_v2 leaves out some of
    the highest scores (`scripts/fast_topk_exactness.py`).

    On a Hopper device with both installed; keys of 128 dimensions, 32 or 64 heads. `rows` says of how many queries
    scores exist at a time.
    """
    import deep_gemm
    import sgl_kernel

    found = torch.empty((len(q), TOPK), dtype=torch.int32, device=q.device)
    for first in range(0, len(q), rows):
        part = slice(first, first + rows)
        start, end = starts[part], ends[part]
        logits = deep_gemm.fp8_mqa_logits(q[part], (k, k_scale), weights[part], start, end, clean_logits=False)
        chosen = sgl_kernel.fast_topk_v2(logits, end - start, TOPK, row_starts=start)
        found[part] = torch.where(chosen < 0, chosen, chosen + start[:, None])
    return found
