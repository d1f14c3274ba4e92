"""Rows of prompts over tensor-parallel ranks: each rank selects for some, and all get all.

All ranks of an attention group read the same prompts, with the same index keys, and would make the same selections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

_PARTS = "_indexcache_parts"
LEAST_ROWS = 1024  # with fewer, every rank selects for all of them
LEAST_KEYS = 8192  # likewise, in the mean of the rows: scores of fewer take no longer than the exchange
STRIPE = 64  # rows; later rows take longer, so ranks take turns


@dataclass(frozen=True)
class Part:
    """One rank's part of some rows.

    Attributes:
        own: numbers of the rows that this rank selects for, `[n]`, n alike on all ranks; the last one may come again.
        back: for each row, its place among the selections of all ranks, one rank after the other.
    """

    own: Tensor
    back: Tensor


@dataclass(frozen=True)
class Shards:
    """One rank's part of the rows of a prefill.

    Attributes:
        rank: this rank's number in its group.
        ranks: number of ranks.
        gather: fills `[ranks * n, k]` with the `[n, k]` of each rank, on every rank of the group at once.
    """

    rank: int
    ranks: int
    gather: Callable[[Tensor, Tensor], object]

    def pays(self, count: int, keys: float) -> bool:
        """Return whether `count` rows, of `keys` in the mean, are shared out; the same on every rank of the group."""
        return self.ranks > 1 and count >= LEAST_ROWS and keys >= LEAST_KEYS

    def share(self, count: int) -> int:
        """Return how many of `count` rows each rank selects for: whole stripes."""
        return -(-count // STRIPE // self.ranks) * STRIPE

    def part(self, count: int, device: torch.device, kept: dict[str, Any]) -> Part:
        """Return this rank's part of `count` rows, made once in `kept` for all layers of a forward pass."""
        key = f"{_PARTS}_{count}"
        if key not in kept:
            share = self.share(count)
            place, row = torch.arange(share, device=device), torch.arange(count, device=device)
            mine = (place // STRIPE * self.ranks + self.rank) * STRIPE + place % STRIPE
            stripe = row // STRIPE
            back = stripe % self.ranks * share + stripe // self.ranks * STRIPE + row % STRIPE
            kept[key] = Part(mine.clamp_max(count - 1), back)
        found: Part = kept[key]
        return found

    def exchange(self, own: Tensor, part: Part) -> Tensor:
        """Return the selections of all rows, `[count, k]`, from those of each rank's part, on every rank at once."""
        every = own.new_empty(self.ranks * len(own), own.shape[1])
        self.gather(every, own.contiguous())
        return every[part.back]


def _nobody(every: Tensor, own: Tensor) -> None:
    raise AssertionError("one rank has nobody to exchange with")


ALONE = Shards(0, 1, _nobody)


def shards_of_this_rank() -> Shards:
    """Return the part of this process in its attention group."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = get_attn_tp_group()
    gather = partial(torch.distributed.all_gather_into_tensor, group=group.device_group)
    return Shards(group.rank_in_group, group.world_size, gather)
