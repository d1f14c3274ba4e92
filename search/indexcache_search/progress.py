"""What a person sees while a search runs."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from indexcache_search import objectives
from indexcache_search.engines.base import Evaluation
from indexcache_search.strategies.greedy import Step
from indexcache_search.tokens import TokenSet


class SearchProgress:
    """A bar with ETA and the best loss of the current step; a line for every committed flip.

    On something that is no terminal (a log file) only the lines are written.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[best]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._data: TokenSet | None = None
        self._baseline: float | None = None
        self._best: tuple[float, str] | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, total: int, data: TokenSet) -> None:
        """Start a new bar for `total` evaluations on `data`."""
        self.wait(name, total)
        self._data, self._baseline, self._best = data, None, None

    def wait(self, name: str, total: int | None = None) -> None:
        """Start a bar without evaluations."""
        if self._task is not None:
            self._progress.update(self._task, visible=False)
        if not self._console.is_terminal:
            self._console.print(name + (f": {total} evaluations" if total else ""))
        self._task = self._progress.add_task(name, total=total, best="")

    def evaluated(self, evaluation: Evaluation) -> None:
        """Advance the bar."""
        assert self._task is not None and self._data is not None
        value = objectives.loss(evaluation, self._data).mean
        if self._baseline is None:
            self._baseline = value
        if self._best is None or value < self._best[0]:
            self._best = (value, evaluation.pattern.roles)
        self._progress.update(self._task, advance=1, best=f"best {self._best[0] - self._baseline:+.4f}")

    def committed(self, step: Step, number: int) -> None:
        """Say which layer became `S`."""
        change = "" if self._baseline is None else f" ({step.loss - self._baseline:+.4f})"
        kept = len(step.pattern.full_layers)
        self._progress.console.print(
            f"step {number:>3}: layer {step.layer:>3} -> S, {kept} of {len(step.pattern)} F,"
            f" loss {step.loss:.4f}{change}"
        )
        self._best = None
