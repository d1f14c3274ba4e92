"""Speed at which a device reads pinned host memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from indexcache_lab.kernels import copy_blocks
from indexcache_lab.kernels.block_swap import WORD

SIZE = 256 << 20  # bytes of host memory
TIMES = 7
ROWS, PART = 64, 4  # rows of memory to gather from, and the inverse of the share of pieces gathered


def copy_bandwidth(device: torch.device) -> float:
    """Measure GB/s of one large copy from pinned host memory to a CUDA device, the median."""
    host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(SIZE, dtype=torch.uint8, device=device)
    return SIZE / _milliseconds(partial(memory.copy_, host, non_blocking=True)) / 1e6


def gather_bandwidth(device: torch.device, piece: int) -> float:
    """Measure GB/s of gathering pieces of `piece` bytes from pinned host memory to a CUDA device, the median.

    A kernel of the device reads them, like HiSparse's and `indexcache_kernels.copy_blocks`. Small pieces are slower
    than one large copy.

    Args:
        device: a CUDA device.
        piece: bytes, rounded down to a multiple of 8.
    """
    piece = max(WORD, piece // WORD * WORD)
    there = max(PART, SIZE // ROWS // piece)
    wanted = there // PART
    host = torch.empty(ROWS, there, piece, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = torch.empty(ROWS, wanted, piece, dtype=torch.uint8, device=device)
    chosen = torch.rand(ROWS, there, device=device).argsort(1)[:, :wanted].int().contiguous()
    slots = torch.arange(wanted, dtype=torch.int32, device=device).repeat(ROWS, 1)
    call = partial(copy_blocks, host, memory, chosen, slots, torch.ones_like(slots, dtype=torch.bool))
    call()  # compiles
    return memory.nbytes / _milliseconds(call) / 1e6


def _milliseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call."""
    times: list[float] = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
