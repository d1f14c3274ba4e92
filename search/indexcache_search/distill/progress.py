"""Progress of a training run on the console."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from indexcache_search.search.progress import bar
from indexcache_search.training.loop import Watch

STAGES = {"warmup": "dense warm-up", "sparse": "sparse training"}


class TrainingProgress:
    """A bar over the steps of all stages, with a line now and then.

    Args:
        console: quiet in all processes but the first. Without a terminal only the lines are printed.
        done: steps done by an earlier run.
        steps: steps of all stages.
        names: displayed names of the stages.
    """

    def __init__(self, console: Console, done: int, steps: int, names: Mapping[str, str] = STAGES) -> None:
        self._progress = bar(console)
        self._task = self._progress.add_task("", total=steps, completed=done)
        self._steps, self._names = steps, names
        self.watch = Watch(self._record, self.show)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, stage: str) -> None:
        """Show the stage that runs."""
        self._progress.update(self._task, description=self._names[stage])

    def _record(self, record: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=record["step"])

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
        self._progress.console.print(text, soft_wrap=True)
