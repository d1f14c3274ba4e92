"""How fast a device reads pinned host memory."""

from __future__ import annotations

import statistics

import torch

SIZE = 256 << 20  # bytes of a copy
TIMES = 7


def measured_bandwidth(device: torch.device) -> float:
    """GB/s of copies from pinned host memory to a CUDA device, the median."""
    host, memory = (
        torch.empty(SIZE, dtype=torch.uint8, pin_memory=True),
        torch.empty(SIZE, dtype=torch.uint8, device=device),
    )
    speeds: list[float] = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        memory.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        speeds.append(SIZE / begin.elapsed_time(end) / 1e6)
    return statistics.median(speeds)
