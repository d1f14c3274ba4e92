"""A function on two ranks of torch.distributed or more, which talk by gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.tools.inprocess import new_thread_pool

RANKS = 2
_SECONDS = 300


def on_two_ranks(function: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = RANKS) -> list[Any]:
    """Call `function(rank, *arguments)` in as many processes, and return what each returned."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([function.__module__])
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
