"""Attention with a bias for each key, without a matrix of all heads, queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EXTRA = 8  # dimensions: fused kernels expect multiples of 8


def attend_with_bias(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor, *, scaling: float
) -> Tensor:
    """Attend by PyTorch's fused attention: the bias is a further dimension of the keys, that all queries have as 1.

    In bfloat16 a number has 8 bits, so the bias takes two dimensions: what is left over of the first is in the second.

    Args:
        query: `[batch, heads, queries, dim]`.
        key: `[batch, key_heads, keys, dim]`.
        value: likewise.
        mask: `[batch, 1 or heads, queries, keys]`, additive.
        bias: `[batch, key_heads, keys]` float32, added to the scaled products.
        scaling: factor of the products.

    Returns:
        `[batch, queries, heads, dim]`; keys get the gradient of eager attention with the same sum of mask and bias.
    """
    added = bias / scaling
    first = added.detach().bfloat16().float()
    parts = F.pad(torch.stack([first, added - first], -1), (0, EXTRA - 2)).to(key.dtype)
    ones = F.pad(query.new_ones(*query.shape[:3], 2), (0, EXTRA - 2))
    share = query.shape[1] // key.shape[1]
    keys, values = (item.repeat_interleave(share, 1) for item in (torch.cat([key, parts], -1), value))
    out = F.scaled_dot_product_attention(torch.cat([query, ones], -1), keys, values, mask, scale=scaling)
    return out.transpose(1, 2)
