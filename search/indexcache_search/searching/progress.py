"""Progress of a search: live on a terminal, elsewhere as lines now and then."""

from __future__ import annotations

import threading
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from indexcache_search.engines.base import TimesPrompts
from indexcache_search.eval.speeds import speeds
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.results.tables import with_error
from indexcache_search.results.variant import NAMED, VariantLosses
from indexcache_search.searching.begin import Begun
from indexcache_search.searching.forecasts import time_left
from indexcache_search.strategies.base import Step
from sglang_indexcache import Pattern

EVERY = 20.0  # seconds between lines where no terminal shows them


class SearchProgress:
    """The phase, the share done, the time left and the best pattern; a line for every committed flip.

    A terminal shows the first live. Something else (a log file) gets them as a line without control characters, when a
    phase begins and every `EVERY` seconds. On a quiet console nothing is reckoned.
    """

    def __init__(self, console: Console, begun: Begun) -> None:
        self.console, self._begun, self._chooses = console, begun, begun.chooses()
        self._time, self._over = time_left(begun), threading.Event()
        timed = isinstance(begun.engine, TimesPrompts) and speeds() is not None
        self._name, self._phase, self._phases = "", 0, 4 + timed
        self._best: tuple[int, float, Pattern] | None = None
        self._live = Live(console=console, get_renderable=self._screen, transient=True)
        # FORCE_COLOR makes a terminal of a log, which wants colours, but no moves of a cursor
        self._is_live = console.is_interactive and console.file.isatty()

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        elif not self.console.quiet:
            threading.Thread(target=self._say_now_and_then, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._live.stop()

    def _say_now_and_then(self) -> None:
        while not self._over.wait(EVERY):
            if self._phase:  # before the first there is nothing to say
                self.notice("; ".join(self._lines()))

    def _screen(self) -> Group:
        bar = ProgressBar(completed=50 * sum(self._time.share or (0.0, 0.0)))
        return Group(Text("\n".join(self._lines()), overflow="fold"), bar)  # which ends without a new line

    def _lines(self) -> list[str]:
        lines = [f"{self._name} ({self._phase} of {self._phases}): {self._time}"]
        if self._best is not None:
            kept, increase, pattern = self._best
            full = f"{kept} of {len(pattern)} {pattern.full_role}"
            lines.append(f"best with {full}: {pattern}, {self._chooses.objective} {increase:+.4f} nats a token")
        return lines

    def begin(self, name: str) -> None:
        """Start the next phase."""
        self._name, self._phase = name, self._phase + 1
        self._time.pause()
        if not self._is_live:
            self.notice("; ".join(self._lines()))

    def evaluated(self, evaluation: Evaluation) -> None:
        """Hear of an evaluation in any phase, the first of which is the baseline's and the second the search's."""
        if self.console.quiet:
            return
        self._time.evaluated(evaluation)
        pattern, goal, data = evaluation.pattern.pattern, self._begun.goal, self._begun.calibration
        if self._phase > 2 or pattern is None or pattern == goal.native:
            return
        kept = len(pattern.full_layers)
        at = max((count, share) for share, count in goal.full_layers.items() if count <= max(kept, goal.fewest))[1]
        if self._phase == 1:
            self.begin(f"search at {at}")
        self._name, whole = f"search at {at}", self._chooses.recorded(pattern)
        if len(whole.rows) == data.num_sequences:
            baseline = self._chooses.recorded(goal.native).on(whole.rows)
            found = (kept, estimates.increase(whole, baseline, data).mean, pattern)
            self._best = found if self._best is None else min(found, self._best, key=lambda item: item[:2])

    def compared(self, row: VariantLosses, baseline: VariantLosses) -> None:
        """Print a line of the held-out comparison if its pattern was requested."""
        if row.line.kind == NAMED:
            rise = estimates.increase(row.evaluation, baseline.evaluation, self._begun.held_out)
            shown = with_error(rise, "+.4f")
            self.notice(f"held out: {row.line.name} {row.line.retention} {shown}  {row.line.pattern}")

    def committed(self, step: Step) -> None:
        """Say which layer changed."""
        native, pattern, kept = self._begun.goal.native, step.pattern, len(step.pattern.full_layers)
        change = step.loss - estimates.loss(self._chooses.recorded(native), self._begun.calibration).mean
        self.notice(
            f"step {len(native.full_layers) - kept:>3}: layer {step.layer:>3} -> {pattern[step.layer]},"
            f" {kept} of {len(pattern)} {pattern.full_role}, loss {step.loss:.4f} ({change:+.4f})"
        )

    def notice(self, line: str) -> None:
        """Say something else."""
        self.console.print(line, soft_wrap=True)
