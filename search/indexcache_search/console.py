"""Output of the commands: results on stdout, messages and bars on stderr, an error as one line and an exit code."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from indexcache_search.errors import NonFiniteLossError
from indexcache_search.results.words import serving_flags
from sglang_indexcache.pattern.selection import PatternSelection
from sglang_indexcache.process import exit_line

PACE = 120.0  # seconds over which the pace is taken: what a journal has is done at once, what it lacks is not
WIDE = 200  # columns where stdout is not a terminal


class Messages(Console):
    """A console whose reader may go away."""

    def on_broken_pipe(self) -> None:
        """Go on without messages."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def messages(quiet: bool = False) -> Console:
    """Return the console for messages to people; it prints texts as they are, without markup."""
    return Messages(stderr=True, highlight=False, markup=False, emoji=False, quiet=quiet)


def results() -> Console:
    """Return the console for results, as wide as the terminal or as `COLUMNS` says."""
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else WIDE
    return Console(highlight=False, markup=False, emoji=False, width=wide)


def command(*words: object) -> str:
    """Format a command line that can be copied."""
    return shlex.join(map(str, words))


def serving(pattern: object, model: object, selection: PatternSelection | None) -> str:
    """Return the command that serves `pattern`, a file with this `selection`, on `model`, a folder or hub id."""
    launch = ("python", "-m", "sglang_indexcache.launch_server")
    return command(*launch, "--indexcache-pattern", pattern, "--model-path", model, *serving_flags(selection))


@contextmanager
def errors_in_one_line(console: Console, command: str) -> Iterator[None]:
    """Print any error as one line, and exit with its code."""
    try:
        yield
    except typer.Exit:
        raise
    except NonFiniteLossError as error:
        console.print(f"{command}: {error}", style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    except BaseException as error:
        line, code = exit_line(error)
        console.print(f"{command}: {line}", style="yellow" if code > 128 else "red", soft_wrap=True)
        raise typer.Exit(code) from None


def bar(console: Console) -> Progress:
    """Make a bar with counts, time and what is left of it; nothing on something that is no terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=PACE,
        expand=True,
    )


def announce(console: Console, line: str) -> None:
    """Print what begins on something that is no terminal (a log file), where no bar shows it."""
    if not console.is_terminal:
        console.print(line, soft_wrap=True, markup=False)


def warn(console: Console, line: str) -> None:
    """Say something that a person should look at."""
    console.print(line, style="yellow", soft_wrap=True)
