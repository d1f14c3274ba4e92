"""Progress of a search on a terminal."""

from __future__ import annotations

from fractions import Fraction
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import TaskID, TextColumn

from indexcache_search.console import announce, bar, warn
from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.results.tables import with_error
from indexcache_search.results.variant import NAMED, VariantLosses
from indexcache_search.strategies.base import Step
from sglang_indexcache import Pattern


class SearchProgress:
    """A bar with ETA and the best loss of the current step; a line for every committed flip.

    On something that is no terminal (a log file) only the lines are written.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = bar(console, TextColumn("{task.fields[best]}", markup=False))
        self._task: TaskID | None = None
        self._data: TokenSet | None = None
        self._baseline: Evaluation | None = None
        self._best: float | None = None
        self._done = 0
        self._first_step = 0  # sequences done when the first step was committed
        self._estimated = False  # the bar's end is a guess from the steps so far

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, total: int | None, data: TokenSet) -> None:
        """Start a new bar for runs of `total` sequences of `data`; `None` where that can't be known before."""
        self.wait(name, total)
        self._data, self._baseline, self._best, self._done = data, None, None, 0
        self._first_step, self._estimated = 0, total is None

    def wait(self, name: str, total: int | None = None) -> None:
        """Start a bar without evaluations."""
        if self._task is not None:
            self._progress.update(self._task, visible=False)
        announce(self._console, name + (f": {total} runs of a sequence" if total else ""))
        self._task = self._progress.add_task(name, total=total, best="")

    def evaluated(self, evaluation: Evaluation) -> None:
        """Advance the bar."""
        assert self._task is not None and self._data is not None
        if self._baseline is None:
            self._baseline = evaluation
        self._done += len(evaluation.rows)
        if len(evaluation.rows) == self._data.num_sequences:
            baseline = self._baseline.on(evaluation.rows)
            value = estimates.increase(evaluation, baseline, self._data).mean
            self._best = value if self._best is None else min(self._best, value)
        best = "" if self._best is None else f"best {self._best:+.4f}"
        for task in self._progress.tasks:
            if task.id == self._task and self._estimated and self._done > (task.total or 0):
                task.total = None  # more than the steps is done, and its end is not known
        self._progress.update(self._task, completed=self._done, best=best)

    def compared(self, row: VariantLosses, baseline: VariantLosses) -> None:
        """Print a line of the held-out comparison if its pattern was requested."""
        assert self._data is not None
        if row.line.kind == NAMED:
            rise = estimates.increase(row.evaluation, baseline.evaluation, self._data)
            shown = with_error(rise, "+.4f")
            self.notice(f"held out: {row.line.name} {row.line.retention} {shown}  {row.line.pattern}")

    def committed(self, step: Step, number: int, steps: int) -> None:
        """Say which layer changed; `number` of about `steps` steps."""
        assert self._task is not None and self._data is not None and self._baseline is not None
        if number == 1:
            self._first_step = self._done
        elif self._estimated:
            later = (self._done - self._first_step) / (number - 1)  # the first step looks at every layer
            self._progress.update(self._task, total=self._done + max(steps - number, 0) * later)
        change = step.loss - estimates.loss(self._baseline, self._data).mean
        kept, role = len(step.pattern.full_layers), step.pattern[step.layer]
        self._progress.console.print(
            f"step {number:>3}: layer {step.layer:>3} -> {role}, {kept} of {len(step.pattern)}"
            f" {step.pattern.full_role}, loss {step.loss:.4f} ({change:+.4f})",
            soft_wrap=True,
        )
        self._best = None

    def found(self, retention: Fraction, pattern: Pattern, done: float) -> None:
        """Say which pattern was found at once; `done` is about the share of the work that is behind."""
        if self._estimated:
            assert self._task is not None
            self._progress.update(self._task, total=self._done / done)
        self._progress.console.print(f"{retention!s:>4}: {pattern}", soft_wrap=True)
        self._best = None

    def notice(self, line: str) -> None:
        """Say something else."""
        self._progress.console.print(line, soft_wrap=True)

    def warn(self, line: str) -> None:
        """Say something that a person should look at."""
        warn(self._progress.console, line)
