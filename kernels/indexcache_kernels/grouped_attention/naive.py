"""Grouped attention in PyTorch, which defines both parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(q: Tensor, kv: Tensor, keys: Tensor, scale: float, count: int, v_dim: int) -> tuple[Tensor, Tensor]:
    """See `indexcache_kernels.grouped_attention.Attend`; `keys` are `[B, K]`, int32, -1 for none."""
    keys = keys[:, :count].long()
    found = kv[keys.clamp_min(0)].float()  # [B, count, D]
    scores = (q.float() @ found.mT * scale).masked_fill((keys < 0)[:, None], -math.inf)
    lse = scores.logsumexp(2)
    weights = (scores - lse[:, :, None]).exp().nan_to_num(0.0)
    return weights @ found[..., :v_dim], lse / math.log(2)


def add_own(
    q: Tensor,
    kv: Tensor,
    own: Tensor,
    shared: Tensor,
    lse: Tensor,
    scale: float,
    out: Tensor,
    seen: Tensor | None = None,
) -> None:
    """Add the tokens of each block, up to each query, to the result over the keys that its queries share.

    Args:
        q: `[B x Q, H, D]`.
        kv: `[N, D]`.
        own: `[B, tokens]`, int32: rows of the tokens of each block, -1 for those that none of its queries sees.
        shared: `[B, at least Q x H, V]`.
        lse: base-2 logarithms of its denominators, `[B, at least Q x H]`.
        scale: what products are multiplied by.
        out: `[B x Q, H, V]`, written.
        seen: `[B x Q]`, int32: how many tokens of its block each query sees; up to itself without it.
    """
    blocks, tokens = own.shape
    queries, (heads, v_dim) = len(out) // blocks, out.shape[1:]
    found = kv[own.long().clamp_min(0)].float()  # [B, tokens, D]
    rows = q.reshape(blocks, queries * heads, -1).float()
    scores = (rows @ found.mT * scale).view(blocks, queries, heads, tokens)
    number = torch.arange(tokens, device=q.device)
    limit = number[None, :, None] + 1 if seen is None else seen.view(blocks, queries, 1)
    scores = scores.masked_fill((number >= limit)[:, :, None], -math.inf)
    before = lse[:, : queries * heads].view(blocks, queries, heads) * math.log(2)
    total = torch.logaddexp(before, scores.logsumexp(3))
    result = (scores - total[..., None]).exp().flatten(1, 2) @ found[..., :v_dim]
    result += (before - total).exp().flatten(1, 2)[..., None] * shared[:, : queries * heads].float().nan_to_num(0.0)
    out.copy_(result.view_as(out))
