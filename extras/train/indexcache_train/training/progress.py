"""Progress of a training run on the console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.progress import Progress

from indexcache_search.console import announce


class TrainingProgress:
    """The steps of all stages on a bar, with a line now and then.

    Args:
        bar: on a quiet console in all processes but the first.
        done: steps done by an earlier run.
        steps: steps of all stages.
        names: displayed names of the stages.
    """

    def __init__(self, bar: Progress, done: int, steps: int, names: Mapping[str, str]) -> None:
        self._bar, self._steps, self._names = bar, steps, names
        self._task = bar.add_task("", total=steps, completed=done)

    def begin(self, stage: str) -> None:
        """Show the stage that runs."""
        announce(self._bar.console, f"{self._names[stage]}: loading the model")
        self._bar.update(self._task, description=self._names[stage])

    def advance(self, done: int) -> None:
        """Show the number of steps done."""
        self._bar.update(self._task, completed=done)

    def show(self, record: dict[str, Any]) -> None:
        """Print a line about a step or an evaluation."""
        if "losses" in record:
            name = f"step {record['step']}" if record["stage"] in self._names else record["stage"]
            text = f"held out, {name}: loss {record['held_out_loss']:.4f}, KL {record['held_out_kl']:.4f}"
        else:
            text = f"step {record['step']:>5}/{self._steps} {self._names[record['stage']]}: "
            text += f"loss {record['loss']:.4f}, " if "loss" in record else ""
            text += f"KL {record['kl']:.4f}, " if "kl" in record else ""
            text += f"{record['seconds']:.1f} s"
            text += f", {record['peak_gb']:.1f} GB" if "peak_gb" in record else ""
        self._bar.console.print(text, soft_wrap=True)
