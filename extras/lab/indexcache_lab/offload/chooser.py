"""A selecting layer in offloaded decoding: which blocks a step reads, and where in the buffer they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from indexcache_lab.kernels import BlockBuffer, swap_blocks
from indexcache_lab.offload.step_selector import StepSelector


@dataclass(frozen=True)
class Choice:
    """Blocks that a layer and those that share with it read.

    Attributes:
        slots: `[rows, K]`, int32, of the buffer.
        held: `[rows, slots]`, int32: the block in each slot; -1 for none.
        missed: number of selected blocks that are missing.
        copies: selected blocks, their slots, and whether they are missing, `[2 B G, K]` each.
        filled: the block that the previous token filled, and its slot, `[2 B G, 1]` each, int32; -1 for none.
    """

    slots: Tensor
    held: Tensor
    missed: Tensor
    copies: tuple[Tensor, Tensor, Tensor]
    filled: tuple[Tensor, Tensor]


@dataclass
class Chooser:
    """A selecting layer.

    Attributes:
        number: index among the selecting layers.
        selector: selects the blocks of a step.
        buffer: blocks on the device, by row of the selector, of this layer and those that share its selection.
        own_rows: rows of a request.
        groups: key heads of a request.
    """

    number: int
    selector: StepSelector
    buffer: BlockBuffer
    own_rows: int
    groups: int

    def begin(self, request: int, keys: Tensor, values: Tensor, block_tokens: int) -> None:
        """Begin a request with its prompt, `[G, L, D]` each; `CachedLayer.begin` stores the blocks."""
        self.selector.begin(request, keys, values)
        full, (_, slots) = (keys.shape[1] - 1) // block_tokens, self.buffer.blocks.shape
        rows, device = slice(request * self.own_rows, (request + 1) * self.own_rows), self.buffer.blocks.device
        held = torch.arange(max(0, full - slots), full, dtype=torch.int32, device=device)
        slot = torch.arange(slots, dtype=torch.int32, device=device)
        self.buffer.blocks[rows] = F.pad(held, (0, slots - len(held)), value=-1)
        self.buffer.order[rows] = torch.cat([slot[len(held) :], slot[: len(held)]])  # empty ones go first

    def choose(self, requested: Tensor, filled: Tensor) -> Choice:
        """Assign slots to the `requested` blocks, `[rows, K]`; `filled` by the previous tokens are `[rows, 1]`."""
        slots, needs_copy = swap_blocks(requested, filled[:, 0], self.buffer)
        slot = torch.where(requested == filled, slots, -1).amax(1, keepdim=True)
        return Choice(
            slots,
            self.buffer.blocks,
            needs_copy.sum(),
            (self._by_key_head(requested), self._by_key_head(slots), self._by_key_head(needs_copy)),
            (self._by_key_head(filled), self._by_key_head(slot)),
        )

    def _by_key_head(self, item: Tensor) -> Tensor:
        """Repeat `[rows, ...]` for keys and values of every key head, `[2 B G, ...]`."""
        return item.repeat_interleave(self.groups // self.own_rows, 0).repeat(2, 1)
