"""Rows of prompts where SGLang's context-parallel prefill has shared them out: rank r has every n-th row from r on.

That is `--cp-strategy interleave`: row i of a pass, whatever request it is of, lies on rank i mod n, behind them may be
rows of padding, and each rank has all index keys. So the queries of a block are on many ranks. Every rank gets all
queries and gates, as they are, in one gather, and selects for every n-th block; another gather gives each rank the
selections of all blocks. Leaders are bit for bit those of one rank alone.

Read: sglang/srt/layers/cp/interleave.py, and `_cal_indexer_k_start_end` in dsa_backend.py, of 0.5.17 and 0.5.23. With
`--cp-strategy zigzag`, 0.5.23 gathers no index keys, and 0.5.17 selects by another method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.sglang.meaning import INTERLEAVE

Rows = TypeVar("Rows", int, Tensor)


class Context:
    """One rank's place among those of context parallelism.

    Args:
        rank: its number.
        ranks: number of ranks.
        gather: fills `[ranks * n, ...]` with the `[n, ...]` of each rank, on every rank at once.
    """

    def __init__(self, rank: int, ranks: int, gather: Callable[[Tensor, Tensor], object]) -> None:
        self.rank, self.ranks = rank, ranks
        self._gather = gather
        self._checked = False

    def of(self, forward_batch: Any) -> Context:
        """Return itself if SGLang shares out the rows of a pass, else `ONE_RANK`; short ones are on all ranks."""
        return ONE_RANK if getattr(forward_batch, "attn_cp_metadata", None) is None else self

    def among(self, start: int, stop: int) -> range:
        """Return those of rows of a pass that are here."""
        return range(start + (self.rank - start) % self.ranks, stop, self.ranks)

    def count(self, every: int) -> int:
        """Return how many of a pass's rows are here."""
        return len(self.among(0, every))

    def place(self, row: Rows) -> Rows:
        """Return the place on this rank of a row, or of each, or of the next one that is here."""
        return (row + (self.ranks - 1 - self.rank)) // self.ranks

    def every(self, own: Tensor, count: int) -> Tensor:
        """Return all `[count, W]` from the rows here, `[at least count(...), W]`, on every rank at once."""
        if self.ranks == 1:
            return own[:count]
        gathered = self._gathered(own, count)
        return gathered.view(self.ranks, -1, own.shape[1]).transpose(0, 1).reshape(gathered.shape)[:count]

    def queries(self, queries: Tensor, gates: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the queries `[T, H, D]` and gates `[T, H, 1]` of all `count` rows, rank by rank, from those here."""
        if self.ranks == 1:
            return queries.contiguous(), gates.contiguous()
        first, second = (item.contiguous().flatten(1).view(torch.int32) for item in (gates, queries))  # no fp8 is sent
        found, width = self._gathered(torch.cat([first, second], 1), count), first.shape[1]
        every_gate = found[:, :width].view(gates.dtype).view(-1, *gates.shape[1:])
        every_query = found[:, width:].view(queries.dtype).view(-1, *queries.shape[1:])
        return every_query, every_gate

    def _gathered(self, own: Tensor, count: int) -> Tensor:
        """Return the rows of all ranks, those of each one behind the other, with rows of zeros where it has fewer."""
        here, share = self.count(count), -(-count // self.ranks)
        mine = own[:share]
        if len(mine) < share:
            mine = torch.cat([own[:here], own.new_zeros(share - here, own.shape[1])])
        gathered = own.new_empty(self.ranks * share, own.shape[1])
        self._gather(gathered, mine.contiguous())
        return gathered

    def check(self, metadata: Any, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Check that SGLang's rows here are those that are expected; their positions once, which waits for the device.

        `prefixes` and `lengths` of requests are those on all ranks.

        Raises:
            ProofError: if they are others.
        """
        if self.ranks == 1:
            return
        seen: Tensor = metadata.get_seqlens_expanded()
        found, wanted = len(seen), self.count(sum(lengths))
        if found == wanted and not self._checked:
            each = zip(prefixes, lengths, strict=True)
            positions = torch.cat([torch.arange(prefix + 1, prefix + length + 1) for prefix, length in each])
            self._checked = torch.equal(seen.cpu().long(), positions[self.rank :: self.ranks])
        if found != wanted or not self._checked:
            raise ProofError(
                f"SGLang has {found} rows on rank {self.rank} of {self.ranks} of context parallelism, expected"
                f" {wanted}, every {self.ranks}th of the pass (--cp-strategy {INTERLEAVE})"
            )


def _nobody(every: Tensor, own: Tensor) -> None:
    raise AssertionError("one rank has nobody to exchange with")


ONE_RANK = Context(0, 1, _nobody)


def context_of_this_rank() -> Context:
    """Return the place of this process; its exchanges take the way of SGLang's own."""
    from sglang.srt.distributed.parallel_state import get_attn_cp_group

    group = get_attn_cp_group()
    return Context(group.rank_in_group, group.world_size, group.all_gather_into_tensor)
