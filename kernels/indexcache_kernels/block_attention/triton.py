"""The kernels of `selected_attention` for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from indexcache_kernels.selected_attention import attend, gradients


class BlockAttention(torch.autograd.Function):
    """Attention over chosen blocks; gradients of the cache and its bias are sums in no fixed order."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        blocks: Tensor,
        lengths: Tensor,
        scale: float,
        block_tokens: int,
    ) -> Tensor:
        """Attend, and keep what the gradients need."""
        ctx.sizes = {"scale": scale, "block_tokens": block_tokens, "num_warps": 4, "num_stages": 2}
        out, lse = attend(q, k, v, v.shape[3], bias, blocks, lengths, **ctx.sizes)
        ctx.save_for_backward(q, k, v, bias, blocks, lengths, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `q`, `k`, `v` and `bias`."""
        q, k, v, bias, blocks, lengths, out, lse = ctx.saved_tensors
        found = gradients(q, k, v, bias, blocks, lengths, out, lse, d_out, **ctx.sizes)
        return *found, None, None, None, None
