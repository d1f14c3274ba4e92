"""Training checkpoints: what trains, its optimizer's state, and the step, sharded as the model is."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
KEPT = 2


class Checkpoints:
    """The checkpoints of a run, one folder each; a folder is there under its name only when it is complete.

    Args:
        folder: of all of them.
        accelerator: of the processes that write and read together.
    """

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self._folder, self._accelerator = folder, accelerator

    def latest(self) -> int:
        """Steps done at the last checkpoint; 0 if there is none."""
        return max((self._step(path) for path in self._complete()), default=0)

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Write a checkpoint, then delete all but the last two."""
        partial = self._folder / "partial"
        weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
        if self._accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        with self._quiet():
            save({"model": weights, "optimizer": state}, checkpoint_id=partial, no_dist=self._alone)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            shutil.rmtree(self.path(step), ignore_errors=True)
            partial.rename(self.path(step))
            for old in self._complete()[:-KEPT]:
                shutil.rmtree(old)
        self._accelerator.wait_for_everyone()

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Read a checkpoint into a model whose parameters train as they did when it was written."""
        weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
        found: dict[str, Any] = {"model": weights, "optimizer": state}
        with self._quiet():
            load(found, checkpoint_id=self.path(step), no_dist=self._alone)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
            options=_OPTIONS,
        )

    @property
    def _alone(self) -> bool:
        return bool(self._accelerator.num_processes == 1)

    @staticmethod
    @contextmanager
    def _quiet() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be with one process
            yield

    def _complete(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"), key=self._step)

    @staticmethod
    def _step(path: Path) -> int:
        return int(path.name.removeprefix("step-"))
