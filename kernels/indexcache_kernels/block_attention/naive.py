"""The definition."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, scale: float, block_tokens: int, lengths: Tensor
) -> Tensor:
    """See `indexcache_kernels.block_attention`: gathered tokens, one request after the other."""
    if bool((lengths > k.shape[2]).any()) or bool((blocks.long() * block_tokens >= lengths[:, None]).any()):
        raise KernelInputError("lengths or blocks name tokens that are not in the cache")
    out = torch.zeros(*q.shape[:2], v.shape[3], dtype=q.dtype, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        tokens = (blocks[row][blocks[row] >= 0].long()[:, None] * block_tokens).add(
            torch.arange(block_tokens, device=q.device)
        )
        tokens = tokens.flatten()
        tokens = tokens[tokens < length]
        if not len(tokens):
            continue
        keys, values = (item[row, :, tokens].float() for item in (k, v))  # [G, tokens, D]
        query = q[row].float().view(len(keys), -1, q.shape[2])  # [G, H / G, D]
        shares = (query @ keys.mT * scale).softmax(-1)
        out[row] = (shares @ values).flatten(0, 1).to(q.dtype)
    return out
