"""Sequences side by side on a CPU: threads with modules of their own, which share out those of PyTorch.

PyTorch's threads meet after every operation on a short sequence, and spin until the last one comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from copy import deepcopy
from threading import Event
from typing import Any, TypeVar

import torch

R = TypeVar("R")
Rows = Sequence[int]
SIGNALS_SECONDS = 0.2  # between looks for an interrupt


def with_same_weights(model: Any) -> Any:
    """Return a copy of all modules of `model` that shares its parameters."""
    return deepcopy(model, {id(item): item for item in model.parameters()})


def side_by_side(lanes: Sequence[Any], work: Callable[[Any, Rows], R], batches: Sequence[Rows]) -> list[R]:
    """Call `work(lane, rows)` for each of `batches`, always in the same lane, and return the results in order.

    After an error or an interrupt no lane begins another batch, and it is raised once all stand still.
    """
    threads, stop, results = torch.get_num_threads(), Event(), dict[int, R]()

    def run(lane: int) -> None:
        torch.set_num_threads(max(1, threads // len(lanes)))
        for number, rows in enumerate(batches):
            if rows[0] % len(lanes) == lane and not stop.is_set():
                results[number] = work(lanes[lane], rows)

    try:
        with ThreadPoolExecutor(len(lanes)) as pool:
            try:
                running = {pool.submit(run, lane) for lane in range(len(lanes))}
                while running:  # a signal that comes just before a wait begins does not end it
                    ended, running = wait(running, SIGNALS_SECONDS, FIRST_COMPLETED)
                    for lane in ended:
                        lane.result()
            finally:
                stop.set()
    finally:
        torch.set_num_threads(threads)
    return [results[number] for number in range(len(batches))]
