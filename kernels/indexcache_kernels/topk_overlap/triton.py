"""Each index of one layer is searched in the sorted ones of another: k log k steps and no temporaries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ABSENT = 2**31 - 1  # stands for -1, behind all others


@triton.jit
def _overlap_kernel(ordered, found, rows, layers, TOPK: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    row, one, other = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if one <= other:
        mine = ordered + (one.to(tl.int64) * rows + row) * TOPK
        theirs = ordered + (other.to(tl.int64) * rows + row) * TOPK
        count = 0
        for at in range(0, TOPK, BLOCK):
            place = at + tl.arange(0, BLOCK)
            wanted = tl.load(mine + place, mask=place < TOPK, other=2147483647)
            low = tl.zeros((BLOCK,), tl.int32)  # entries of the other layer below `wanted`
            for step in tl.static_range(STEPS):
                middle = low + (1 << (STEPS - 1 - step))
                below = tl.load(theirs + middle - 1, mask=middle <= TOPK, other=2147483647)
                low = tl.where(below < wanted, middle, low)
            match = tl.load(theirs + low, mask=low < TOPK, other=-1)
            count += tl.sum(((match == wanted) & (wanted != 2147483647)).to(tl.int32))
        result = found + row.to(tl.int64) * layers * layers
        tl.store(result + one * layers + other, count)
        tl.store(result + other * layers + one, count)


def topk_overlap(indices: Tensor) -> Tensor:
    """See `indexcache_kernels.topk_overlap`."""
    layers, rows, topk = indices.shape
    ordered = indices.masked_fill(indices < 0, ABSENT).sort(dim=2).values.contiguous()
    found = torch.empty((rows, layers, layers), dtype=torch.int32, device=indices.device)
    block = min(1024, max(16, triton.next_power_of_2(topk)))
    _overlap_kernel[(rows, layers, layers)](
        ordered, found, rows, layers, TOPK=topk, STEPS=topk.bit_length(), BLOCK=block, num_warps=4
    )
    return found
