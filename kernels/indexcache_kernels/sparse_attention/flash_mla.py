"""FlashMLA's forward, where SGLang's kernels are installed: written for one shape, and twice as fast there."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DIM, V_DIM, HEADS, KEYS = 576, 512, 64, 128  # the last two: what sizes must be multiples of


@cache
def _library() -> Any:
    """sgl_kernel's flash_mla, None where it is not installed or was built for other devices."""
    try:
        from sgl_kernel import flash_mla, flashmla_ops
    except (ImportError, OSError, RuntimeError):
        return None
    return flash_mla if flashmla_ops else None


def fits(q: Tensor, k: Tensor, v: Tensor | int) -> bool:
    """Whether it can run: absorbed MLA in bfloat16 with a multiple of 64 heads, on a Hopper device."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9 or _library() is None:
        return False
    shape = isinstance(v, int) and (v, q.shape[2], k.shape[1]) == (V_DIM, DIM, 1)
    return shape and q.shape[1] % HEADS == 0 and q.dtype == torch.bfloat16


def forward(q: Tensor, k: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The result and the logarithm of the denominator, as `indexcache_kernels.sparse_attention`."""
    padded = F.pad(indices, (0, -indices.shape[1] % KEYS), value=-1)
    out, _, lse = _library().flash_mla_sparse_fwd(q, k.contiguous(), padded[:, None], scale)
    empty = (indices < 0).all(dim=1)
    return out.masked_fill_(empty[:, None, None], 0.0), (lse * math.log(2)).masked_fill_(empty[:, None], -torch.inf)
