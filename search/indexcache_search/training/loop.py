"""The training loop: steps, evaluations, checkpoints and records of whatever a task trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from indexcache_search.training.checkpoints import Checkpoints
from indexcache_search.training.log import TrainingLog
from indexcache_search.training.processes import Processes
from indexcache_search.training.settings import Intervals


@dataclass(frozen=True)
class Watch:
    """Who wants to hear of a run: `record` each step's record, `show` lines for people."""

    record: Callable[[dict[str, Any]], None]
    show: Callable[[dict[str, Any]], None]


class Task(Protocol):
    """What is trained."""

    @property
    def stage(self) -> str:
        """Its name in records."""
        ...

    @property
    def model(self) -> nn.Module:
        """Sharded or not."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """Holds all that trains."""
        ...

    @property
    def steps(self) -> tuple[int, int]:
        """Its first step, and one past its last; a run of several tasks counts on."""
        ...

    def step(self, number: int) -> dict[str, Any]:
        """Take step `number`, counted from 0; the record of what happened, with `step`: steps done."""
        ...

    def evaluate(self) -> dict[str, Any]:
        """What the model is worth now, for a record."""
        ...


class Loop:
    """Runs tasks.

    Args:
        processes: those that train together.
        checkpoints: where the run's states are kept.
        log: the run's records, in the process that writes them.
        watch: hears of everything.
        intervals: between what takes time.
    """

    def __init__(
        self,
        processes: Processes,
        checkpoints: Checkpoints,
        log: TrainingLog | None,
        watch: Watch,
        intervals: Intervals,
    ) -> None:
        self._processes, self._checkpoints, self._log = processes, checkpoints, log
        self._watch, self._intervals = watch, intervals

    def train(self, task: Task, done: int) -> None:
        """Run `task` to its end, from the checkpoint at `done` steps where it has begun before.

        Raises:
            NonFiniteLossError: if a loss or gradient is NaN or infinite; the step is not taken.
        """
        first, last = task.steps
        if done > first:
            self._checkpoints.load(done, task.model, task.optimizer)
        task.model.train()
        device, intervals = self._processes.device, self._intervals
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        while done < last:
            began = time.monotonic()
            record = task.step(done)
            done += 1
            record["seconds"] = round(time.monotonic() - began, 3)
            if device.type == "cuda":
                record["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
            self._note(record, self._watch.record)
            if done % intervals.show == 0 or done in (1, last):
                self._watch.show(record)
            if done % intervals.evaluate == 0 or done == last:
                self.report({"step": done, "stage": task.stage, **task.evaluate()})
            if done % intervals.checkpoint == 0 or done == last:
                self._checkpoints.save(done, task.model, task.optimizer)

    def report(self, record: dict[str, Any]) -> None:
        """Write down an evaluation, and show it."""
        self._note(record, self._watch.show)

    def _note(self, record: dict[str, Any], hear: Callable[[dict[str, Any]], None]) -> None:
        if self._log is not None:
            self._log.add(record)
        hear(record)
