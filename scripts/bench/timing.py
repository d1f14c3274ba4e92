"""Times of calls: medians of turns, by CUDA events or by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
Result = TypeVar("Result")


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of a call and its seconds by the host's clock, which waits for the device before and after."""
    _synchronize()
    began = time.perf_counter()
    result = call()
    _synchronize()
    return result, time.perf_counter() - began


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def host_ms(call: Call) -> float:
    """Return the milliseconds of a call by the host's clock."""
    return 1e3 * timed(call)[1]


def cuda_ms(call: Call) -> float:
    """Return the milliseconds of a call by events on the current CUDA stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds


def times_in_turns(
    calls: Mapping[str, Call], turns: int, *, warm: int = 1, clock: Callable[[Call], float] = cuda_ms
) -> dict[str, list[float]]:
    """Return the milliseconds of calls that take turns, without those of the first `warm` turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm + turns):
        for name, call in calls.items():
            milliseconds = clock(call)
            if turn >= warm:
                found[name].append(milliseconds)
    return found


def median_ms(call: Call, turns: int, *, warm: int = 1, clock: Callable[[Call], float] = cuda_ms) -> float:
    """Return the median milliseconds of a call."""
    return statistics.median(times_in_turns({"": call}, turns, warm=warm, clock=clock)[""])


def captured(call: Call, calls: int = 1) -> Call:
    """Capture calls in a CUDA graph, for those that are launched more slowly than they run; return its replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def graph_ms(call: Call, calls: int = 10) -> float:
    """Return the median milliseconds of a call among several in one CUDA graph."""
    return median_ms(captured(call, calls), 10) / calls
