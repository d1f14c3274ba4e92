"""Rows of prompts over tensor-parallel ranks: each rank selects for some, and all get all.

All ranks of an attention group read the same prompts, with the same index keys, and would make the same selections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

LEAST_ROWS = 1024  # with fewer, every rank selects for all of them
STRIPE = 64  # rows; later rows take longer, so ranks take turns


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

    def pays(self, count: int) -> bool:
        """Return whether `count` rows are shared out; every rank of the group returns the same."""
        return self.ranks > 1 and count >= LEAST_ROWS

    def select(self, count: int, device: torch.device, choose: Callable[[Tensor | slice], Tensor]) -> Tensor:
        """Select for `count` rows, on every rank of the group at once.

        Args:
            count: number of rows, the same on all ranks.
            device: where they are.
            choose: gives the selections `[n, k]`, int32, of the rows that it is given to index with.

        Returns:
            `[count, k]`.
        """
        if not self.pays(count):
            return choose(slice(count))
        stripes = -(-count // STRIPE)
        share = -(-stripes // self.ranks) * STRIPE
        place = torch.arange(share, device=device)
        mine = (place // STRIPE * self.ranks + self.rank) * STRIPE + place % STRIPE
        own = choose(mine.clamp_max(count - 1)).contiguous()
        every = own.new_empty(self.ranks * share, own.shape[1])
        self.gather(every, own)
        row = torch.arange(count, device=device)
        stripe = row // STRIPE
        return every[stripe % self.ranks * share + stripe // self.ranks * STRIPE + row % STRIPE]


def _nobody(every: Tensor, own: Tensor) -> None:
    raise AssertionError("one rank has nobody to exchange with")


ALONE = Shards(0, 1, _nobody)


def shards_of_this_rank() -> Shards:
    """Return the part of this process in its attention group."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = get_attn_tp_group()
    gather = partial(torch.distributed.all_gather_into_tensor, group=group.device_group)
    return Shards(group.rank_in_group, group.world_size, gather)
