"""The steps of selecting for blocks, in PyTorch, which defines them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from indexcache_kernels.prompt_blocks import IndexSpace


def mean_queries(q: Tensor, gates: Tensor, first: Tensor, sizes: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """See `indexcache_kernels.prompt_blocks.mean_queries`."""
    rows, row = _members(first, sizes)
    rows = rows % ranks * (len(q) // ranks) + rows // ranks
    queries = q.view(torch.uint8)[rows].view(q.dtype) if q.itemsize == 1 else q[rows]  # fp8 has no indexing
    count = sizes[:, None, None].float()
    sums = [q.new_zeros(len(first), *item.shape[1:], dtype=torch.float32) for item in (q, gates)]
    sums[0].index_add_(0, row, queries.float())
    sums[1].index_add_(0, row, gates[rows])
    return (sums[0] / count).to(q.dtype), sums[1] / count


def lowest_last(scores: Tensor, chosen: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """See `indexcache_kernels.prompt_blocks.lowest_last`."""
    columns = (chosen + starts[:, None]).clamp_min(0).long()
    found = scores.gather(1, columns).masked_fill(chosen < 0, float("-inf"))
    best = found.sort(dim=1, descending=True, stable=True).indices
    moved = torch.arange(chosen.shape[1], device=chosen.device) >= chosen.shape[1] - counts[:, None]
    is_moved = torch.zeros_like(moved).scatter_(1, best, moved)
    return chosen.gather(1, is_moved.int().sort(dim=1, stable=True).indices)


def expand_blocks(
    chosen: Tensor,
    first: Tensor,
    sizes: Tensor,
    begins: Tensor,
    space: IndexSpace,
    result: Tensor,
    *,
    rank: int,
    ranks: int,
) -> None:
    """See `indexcache_kernels.prompt_blocks.expand_blocks`."""
    topk = chosen.shape[1]
    given_up = torch.where(sizes > 1, sizes, 0)[:, None]
    own = torch.arange(topk, dtype=torch.int32, device=chosen.device) - (
        topk - given_up
    )  # number of a token in its block
    indices = translate(torch.where(own < 0, chosen, begins[:, None] + own), space)
    rows, row = _members(first, sizes)
    here = rows % ranks == rank
    rows, row = rows[here], row[here]
    own = own[row]
    result[rows // ranks] = torch.where(own > (rows - first[row])[:, None], -1, indices[row])


def translate(positions: Tensor, space: IndexSpace) -> Tensor:
    """Return what attention reads instead of positions `[R, K]`, int32; -1 stays."""
    if space.offsets is not None:
        indices = positions + space.offsets[:, None]
    elif space.pages is not None:
        assert space.requests is not None
        at = positions.clamp_min(0).long()
        page = space.pages[space.requests[:, None].long(), at // space.page_size]
        indices = page * space.page_size + at % space.page_size
    else:
        return positions
    return torch.where(positions < 0, -1, indices).int()


def _members(first: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries of all rows, and the number of the row of each."""
    counts = sizes.long()
    row = torch.arange(len(first), device=first.device).repeat_interleave(counts)
    within = torch.arange(len(row), device=first.device) - (counts.cumsum(0) - counts)[row]
    return first.long()[row] + within, row
