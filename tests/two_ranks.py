"""A function on two ranks or more: processes that talk by gloo, or threads that meet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.tools.inprocess import new_thread_pool
from tests.forked import fork_server

RANKS = 2
_SECONDS = 300


def on_two_ranks(function: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = RANKS) -> list[Any]:
    """Call `function(rank, *arguments)` in as many processes, and return what each returned."""
    server = fork_server()
    processes = [server.Process(target=_run, args=(function, folder, rank, ranks, arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_SECONDS)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * ranks
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]


def _run(function: Callable[..., Any], folder: Path, rank: int, ranks: int, arguments: Any) -> None:
    new_thread_pool()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=ranks)
    torch.save(function(rank, *arguments), folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def in_threads(ranks: int, run: Callable[[Any], Any], of_rank: Callable[..., Any]) -> list[Any]:
    """Call `run` on each rank, in threads that meet where processes would, and return what each returned.

    Args:
        ranks: number of ranks.
        run: called with what `of_rank` makes.
        of_rank: called with the rank, the number of ranks, and a function that gathers a tensor of all of them.
    """
    parts: list[Any] = [None] * ranks
    arrived, left = Barrier(ranks), Barrier(ranks)

    def gather(rank: int, every: Tensor, own: Tensor) -> None:
        parts[rank] = own
        arrived.wait(60)
        every.copy_(torch.cat(parts))
        left.wait(60)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: run(of_rank(rank, ranks, partial(gather, rank))), range(ranks)))
