"""Dense causal attention of the warm-up, for long contexts: no `[queries, keys]` tensor, and its denominators."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def dense_attention(attention: Any, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of all heads over all earlier keys.

    Args:
        attention: what makes keys and values of latents.
        query: `[batch, heads, queries, dim]`.
        key: `[batch, 1, keys, latent + rope]`, as many keys as queries.
        scale: of the products.

    Returns:
        `[batch, queries, heads, value]`, and the logarithms of the softmax's denominators, `[batch, heads, queries]`,
        float32.
    """
    query, key = query.detach(), key.detach()
    latent, rope = torch.split(key, [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    keys, values = type(attention).expand_kv(attention, latent, rope)
    run = _compiled() if query.device.type == "cuda" else flex_attention
    mask = _causal(query.shape[2], query.device)
    output, lse = run(
        query, keys.to(query.dtype), values.to(query.dtype), block_mask=mask, scale=scale, return_lse=True
    )
    return output.transpose(1, 2).contiguous(), lse.float()


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


@cache
def _causal(length: int, device: torch.device) -> BlockMask:
    def earlier(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(earlier, None, None, length, length, device=str(device))
