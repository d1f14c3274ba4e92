"""FlashMLA's forward, where SGLang's kernels are installed: written for one shape, and twice as fast there.

Fewer heads than it takes at once are padded, which is faster than other kernels still.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DIM, V_DIM, HEADS, KEYS = 576, 512, 64, 128  # the last two: what sizes must be multiples of


@cache
def _library() -> Any:
    """Import sgl_kernel's flash_mla; None where it is not installed or was built for other devices."""
    try:
        from sgl_kernel import flash_mla, flashmla_ops
    except (ImportError, OSError, RuntimeError):
        return None
    return flash_mla if flashmla_ops else None


def fits(q: Tensor, k: Tensor, v: Tensor | int) -> bool:
    """Return whether it can run: absorbed MLA in bfloat16, fewer than 64 heads or a multiple, on a Hopper device."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9 or _library() is None:
        return False
    shape = isinstance(v, int) and (v, q.shape[2], k.shape[1]) == (V_DIM, DIM, 1)
    return shape and (q.shape[1] % HEADS == 0 or q.shape[1] < HEADS) and q.dtype == torch.bfloat16


def forward(q: Tensor, k: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return result and base-2 logarithm of the denominator; neither means anything where a query has no key."""
    heads, topk = q.shape[1], indices.shape[1]
    chosen = F.pad(indices, (0, -topk % KEYS), value=-1) if topk % KEYS else indices
    queries = F.pad(q, (0, 0, 0, -heads % HEADS)) if heads % HEADS else q
    out, _, lse = _library().flash_mla_sparse_fwd(queries, k.contiguous(), chosen[:, None], scale)
    return out[:, :heads].contiguous(), lse[:, :heads].contiguous()
