"""The definition, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    scale: float,
    block_tokens: int,
    lengths: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `indexcache_kernels.block_attention`, with `q`, `blocks` and `lengths` of several queries a request.

    Tokens are gathered, one query after the other.
    """
    if bool((lengths > k.shape[2]).any()) or bool((blocks.long() * block_tokens >= lengths[..., None]).any()):
        raise KernelInputError("lengths or blocks name tokens that are not in the cache")
    rows = []
    for request, asked in enumerate(blocks):
        for query, chosen in enumerate(asked):
            tokens = (chosen[chosen >= 0].long()[:, None] * block_tokens).add(
                torch.arange(block_tokens, device=q.device)
            )
            tokens = tokens[tokens < lengths[request, query]]
            keys, values = (item[request, :, tokens].float() for item in (k, v))  # [G, tokens, D]
            heads = q[request, query].float().view(len(keys), -1, q.shape[3])  # [G, H / G, D]
            products = heads @ keys.mT * scale
            if bias is not None:
                products = products + bias[request, :, None, tokens]
            shares = products.softmax(-1)  # of none, for a query without a block
            rows.append((shares @ values).flatten(0, 1).to(q.dtype))
    return torch.stack(rows).view(*q.shape[:3], v.shape[3])
