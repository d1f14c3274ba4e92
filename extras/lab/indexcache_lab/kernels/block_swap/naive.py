"""The definitions, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def swap_blocks(
    requested: Tensor, new_block: Tensor, *, blocks: Tensor, order: Tensor, slots: Tensor, needs_copy: Tensor
) -> None:
    """Write `slots` and `needs_copy`, and update `blocks` and `order` of the buffer."""
    for row, own in enumerate(requested.tolist()):
        used = order[row].tolist()
        slot_of = {int(blocks[row, slot]): slot for slot in used}
        here = {block for block in own if block in slot_of and block >= 0}
        hits = [slot for slot in used if int(blocks[row, slot]) in here]
        stale = [slot for slot in used if int(blocks[row, slot]) not in here]
        missing = [block for block in own if block >= 0 and block not in here]
        taken, left = stale[: len(missing)], stale[len(missing) :]
        for block, slot in zip(missing, taken, strict=True):
            blocks[row, slot] = block
            slot_of[block] = slot
        order[row] = torch.tensor([*left, *taken, *hits])
        slots[row] = torch.tensor([slot_of[block] if block >= 0 else -1 for block in own])
        needs_copy[row] = torch.tensor([block in missing and block != int(new_block[row]) for block in own])


def copy_blocks(source: Tensor, target: Tensor, requested: Tensor, slots: Tensor, needs_copy: Tensor) -> None:
    """Copy every marked block into its slot."""
    for row, number in needs_copy.nonzero().tolist():
        target[row, int(slots[row, number])] = source[row, int(requested[row, number])].to(target.device)
