"""Grouped attention in PyTorch, which defines both parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(q: Tensor, kv: Tensor, keys: Tensor, scale: float, count: int, v_dim: int) -> tuple[Tensor, Tensor]:
    """See `indexcache_kernels.grouped_attention.Attend`.

    Args:
        q: `[B, R, D]`.
        kv: `[N, D]`.
        keys: `[B, K]`, int32, -1 for none.
        scale: what products are multiplied by.
        count: number of columns of `keys` that are attended to.
        v_dim: dimensions of a value, the first ones of a key.
    """
    keys = keys[:, :count].long()
    found = kv[keys.clamp_min(0)].float()  # [B, count, D]
    scores = (q.float() @ found.mT * scale).masked_fill((keys < 0)[:, None], -math.inf)
    lse = scores.logsumexp(2)
    weights = (scores - lse[:, :, None]).exp().nan_to_num(0.0)
    return weights @ found[..., :v_dim], lse / math.log(2)


def add_own(q: Tensor, kv: Tensor, own: Tensor, shared: Tensor, lse: Tensor, scale: float, out: Tensor) -> None:
    """Add the tokens of each block, up to each query, to the result over the keys that its queries share.

    Args:
        q: `[B x Q, H, D]`.
        kv: `[N, D]`.
        own: `[B, Q]`, int32: rows of the tokens of each block.
        shared: `[B, at least Q x H, V]`.
        lse: base-2 logarithms of its denominators, `[B, at least Q x H]`.
        scale: what products are multiplied by.
        out: `[B x Q, H, V]`, written.
    """
    blocks, queries = own.shape
    heads, v_dim = out.shape[1:]
    found = kv[own.long()].float()  # [B, Q, D]
    rows = q.reshape(blocks, queries * heads, -1).float()
    scores = (rows @ found.mT * scale).view(blocks, queries, heads, queries)
    later = torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later[None, :, None], -math.inf)
    before = lse[:, : queries * heads].view(blocks, queries, heads) * math.log(2)
    total = torch.logaddexp(before, scores.logsumexp(3))
    result = (scores - total[..., None]).exp().flatten(1, 2) @ found[..., :v_dim]
    result += (before - total).exp().flatten(1, 2)[..., None] * shared[:, : queries * heads].float().nan_to_num(0.0)
    out.copy_(result.view_as(out))
