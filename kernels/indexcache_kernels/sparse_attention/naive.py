"""The definition, in PyTorch: gather the selected keys of each query, then attend to them."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `indexcache_kernels.sparse_attention`, in float64 where `q` is, else in float32."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    if not len(k):  # a key that nobody selects can be read all the same
        k, v = (item.new_zeros(1, *item.shape[1:]) for item in (k, v))
    chosen = indices.clamp(min=0).long()
    keys, values = (item.to(dtype)[chosen].repeat_interleave(group, dim=2) for item in (k, v))  # [T, K, H, .]
    scores = torch.einsum("thd,tkhd->thk", q.to(dtype), keys) * scale
    scores = scores.masked_fill((indices < 0)[:, None], -torch.inf)
    lse = scores.logsumexp(dim=2)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, :, None]).exp()
    return torch.einsum("thk,tkhd->thd", weights, values).to(q.dtype), lse.detach()
