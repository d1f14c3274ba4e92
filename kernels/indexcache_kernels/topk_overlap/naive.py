"""The definition, in PyTorch: every index of one layer against every index of another."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_overlap(indices: Tensor) -> Tensor:
    """See `indexcache_kernels.topk_overlap`."""
    layers, rows, _ = indices.shape
    found = torch.zeros((rows, layers, layers), dtype=torch.int32, device=indices.device)
    for one in range(layers):
        for other in range(layers):
            same = (indices[one][:, :, None] == indices[other][:, None, :]) & (indices[one] >= 0)[:, :, None]
            found[:, one, other] = same.sum(dim=(1, 2))
    return found
