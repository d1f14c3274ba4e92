"""The definitions, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def swap_blocks(wanted: Tensor, born: Tensor, *, blocks: Tensor, order: Tensor, slots: Tensor, loads: Tensor) -> None:
    """Write `slots` and `loads`, and what the buffer holds from then on into `blocks` and `order`."""
    for row, own in enumerate(wanted.tolist()):
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
        needed = [block in missing and block != int(born[row]) for block in own]
        loads[row] = torch.tensor(needed)


def copy_blocks(source: Tensor, target: Tensor, wanted: Tensor, slots: Tensor, loads: Tensor) -> None:
    """Copy every block that is to be loaded into its slot."""
    for row, number in loads.nonzero().tolist():
        target[row, int(slots[row, number])] = source[row, int(wanted[row, number])].to(target.device)
