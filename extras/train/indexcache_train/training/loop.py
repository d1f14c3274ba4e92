"""The training loop: steps, evaluations, checkpoints and records of a task."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from indexcache_train.training.checkpoints import Checkpoints
from indexcache_train.training.log import TrainingLog
from indexcache_train.training.processes import Processes
from indexcache_train.training.progress import TrainingProgress
from indexcache_train.training.settings import Intervals


class Task(ABC):
    """Training of one model, step by step.

    Attributes:
        stage: name of the stage in records.
        model: the model that trains, sharded or not.
        optimizer: the optimizer of all trainable weights.
        steps: first step, and one past the last; the tasks of a run count on.
    """

    stage: str
    model: Any
    optimizer: torch.optim.Optimizer
    steps: tuple[int, int]

    @abstractmethod
    def step(self, number: int) -> dict[str, Any]:
        """Take step `number`, counted from 0, and return its record, with `step`: steps done.

        Raises:
            NonFiniteLossError: if a loss or gradient is NaN or infinite; the step is not taken.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model, and return a record."""


@dataclass(frozen=True)
class Loop:
    """Runner of tasks.

    Attributes:
        processes: all processes of the run.
        checkpoints: of the run.
        log: the run's records, in the first process.
        progress: shows them.
        intervals: steps between evaluations, checkpoints and lines.
    """

    processes: Processes
    checkpoints: Checkpoints
    log: TrainingLog | None
    progress: TrainingProgress
    intervals: Intervals

    def train(self, task: Task, done: int) -> None:
        """Run `task` to its end; if it has begun before, from the checkpoint at `done` steps.

        Raises:
            NonFiniteLossError: if a loss or gradient is NaN or infinite; the step is not taken.
        """
        first, last = task.steps
        if done > first:
            self.checkpoints.load(done, task.model, task.optimizer)
        task.model.train()
        device, intervals = self.processes.device, self.intervals
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        while done < last:
            began = time.monotonic()
            record = task.step(done)
            done += 1
            record["seconds"] = round(time.monotonic() - began, 3)
            if device.type == "cuda":
                record["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
            self._add(record)
            self.progress.advance(done)
            if done % intervals.show == 0 or done in (1, last):
                self.progress.show(record)
            if done % intervals.evaluate == 0 or done == last:
                self.report({"step": done, "stage": task.stage, **task.evaluate()})
            if done % intervals.checkpoint == 0 or done == last:
                self.checkpoints.save(done, task.model, task.optimizer)

    def report(self, record: dict[str, Any]) -> None:
        """Log an evaluation, and show it."""
        self._add(record)
        self.progress.show(record)

    def _add(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.add(record)
