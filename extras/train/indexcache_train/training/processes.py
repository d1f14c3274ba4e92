"""The processes that train together, as `torchrun` starts them; a single one without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from indexcache_search.errors import SearchError

PATIENCE = timedelta(hours=2)  # waiting for another process, which may be reading the weights


@dataclass(frozen=True)
class Processes:
    """This process among those of a run.

    Attributes:
        index: number of this process; the first, 0, writes and prints.
        count: number of processes.
        device: device of this process.
        bfloat16: compute in bfloat16, else in float32.
    """

    index: int
    count: int
    device: torch.device
    bfloat16: bool

    @property
    def first(self) -> bool:
        """True in the process that writes and prints."""
        return self.index == 0

    @property
    def shards(self) -> bool:
        """True if the model is sharded. A single process shards in bfloat16, so that one and several train alike."""
        return self.count > 1 or self.bfloat16

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else nullcontext()

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            dist.barrier()

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Run the block in the first process, then in the others."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over processes, on the CPU."""
        if self.count == 1:
            return values
        total = values.to(self.device)
        dist.all_reduce(total)
        return total.cpu()

    def gather(self, item: Any) -> list[Any]:
        """Return every process's `item`, in order."""
        items = [item] * self.count
        if self.count > 1:
            dist.all_gather_object(items, item)
        return items

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, on this process's device, with the first process's."""
        if self.count > 1:
            dist.broadcast(tensor, src=0)


@contextmanager
def joined(device: str, dtype: str) -> Iterator[Processes]:
    """Join the other processes of RANK, LOCAL_RANK and WORLD_SIZE while the block lasts.

    Args:
        device: `cpu`, or `auto` for this process's GPU if there is one.
        dtype: of computations: `float32`, `bfloat16`, or `auto` for bfloat16 on a GPU.

    Raises:
        SearchError: if there are more processes on this machine than GPUs.
    """
    index, count = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    own, backend = torch.device("cpu"), "gloo"
    if device == "auto" and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise SearchError(
                f"process {local} of this machine has no GPU, PyTorch sees {torch.cuda.device_count()}; expected at"
                " most one process a GPU, or --device cpu"
            )
        own, backend = torch.device("cuda", local), "nccl"
        torch.cuda.set_device(own)
    processes = Processes(index, count, own, dtype == "bfloat16" or (dtype == "auto" and own.type == "cuda"))
    if not processes.shards:
        yield processes
        return
    # FSDP2 needs a group, even of one process.
    alone = {"store": cast(Any, dist).HashStore(), "rank": 0, "world_size": 1} if count == 1 else {}
    dist.init_process_group(backend, timeout=PATIENCE, device_id=own if own.type == "cuda" else None, **alone)
    ended = False
    try:
        yield processes
        ended = True
    finally:
        if ended or count == 1:  # after an error others may wait for this process, until the launcher ends them
            dist.destroy_process_group()
