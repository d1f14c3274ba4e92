"""Attention over unions in PyTorch, which defines both steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from indexcache_lab.kernels.union_attention import Unions


def unite(table: Tensor, queries: int, cache: int) -> Unions:
    """See `indexcache_lab.kernels.union_attention.unite`."""
    from indexcache_lab.kernels.union_attention import Unions

    blocks = -(-len(table) // queries)
    keys, owners, counts = room_for(table, queries)
    for block in range(blocks):
        found: dict[int, int] = {}
        for number, row in enumerate(table[block * queries : (block + 1) * queries].tolist()):
            for key in row:
                if 0 <= key < cache:
                    found[key] = found.get(key, 0) | 1 << number
        ordered, count = sorted(found), len(found)
        if ordered:
            keys[block, :count] = torch.tensor(ordered, dtype=torch.int32)
            keys[block, count : padded(count)] = ordered[-1]
            owners[block, :count] = torch.tensor([found[key] for key in ordered], dtype=torch.uint8)
            owners[block, count : padded(count)] = 0
        counts[block] = count
    return Unions(keys, owners, counts, queries, len(table), cache)


def padded(count: int) -> int:
    """Return how many keys are written where there are `count`."""
    from indexcache_lab.kernels.union_attention import TILE

    return -(-count // TILE) * TILE


def room_for(table: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the keys, owners and counts of the unions of a table."""
    blocks, room = -(-len(table) // queries), padded(queries * table.shape[1])
    keys = torch.empty((blocks, room), dtype=torch.int32, device=table.device)
    return keys, torch.empty_like(keys, dtype=torch.uint8), torch.empty(blocks, dtype=torch.int32, device=table.device)


def union_attention(q: Tensor, kv: Tensor, unions: Unions, scale: float, out: Tensor) -> None:
    """See `indexcache_lab.kernels.union_attention.union_attention`; `out` is `[T, H, V]`."""
    for block, count in enumerate(unions.counts.tolist()):
        keys, owners = unions.keys[block, :count].long(), unions.owners[block, :count].int()
        rows = slice(block * unions.queries, (block + 1) * unions.queries)
        found, own = kv[keys].float(), q[rows].float()  # [count, D], [queries, H, D]
        numbers = torch.arange(len(own), device=q.device, dtype=torch.int32)
        selected = owners >> numbers[:, None] & 1 == 1  # [queries, count]
        scores = (own @ found.T * scale).masked_fill(~selected[:, None], -math.inf)
        out[rows] = (scores.softmax(2).nan_to_num(0.0) @ found[:, : out.shape[2]]).to(out.dtype)
