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
    """Compute `indexcache_lab.kernels.block_attention`, with `q`, `blocks` and `lengths` of several queries a request.

    Tokens are gathered, one query and key head after the other.
    """
    if blocks.ndim == 3:
        blocks = blocks[:, :, None].expand(-1, -1, k.shape[1], -1)  # [B, T, G, N]
    if bool((lengths > k.shape[2]).any()) or bool((blocks.long() * block_tokens >= lengths[..., None, None]).any()):
        raise KernelInputError("lengths or blocks name tokens that are not in the cache")
    rows = []
    for request, asked in enumerate(blocks):
        for query, by_head in enumerate(asked):
            grouped = q[request, query].float().view(k.shape[1], -1, q.shape[3])  # [G, H / G, D]
            for kv_head, (chosen, heads) in enumerate(zip(by_head, grouped, strict=True)):
                tokens = (chosen[chosen >= 0].long()[:, None] * block_tokens).add(
                    torch.arange(block_tokens, device=q.device)
                )
                tokens = tokens[tokens < lengths[request, query]]
                keys, values = (item[request, kv_head, tokens].float() for item in (k, v))  # [tokens, D]
                products = heads @ keys.mT * scale
                if bias is not None:
                    products = products + bias[request, kv_head, tokens]
                shares = products.softmax(-1)  # of none, for a query without a block
                rows.append((shares @ values).to(q.dtype))  # [H / G, V]
    return torch.stack(rows).view(*q.shape[:3], v.shape[3]) if rows else q.new_zeros(*q.shape[:3], v.shape[3])
