"""Output of the commands: results on stdout, messages on stderr, an error as one line and an exit code."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from indexcache_search.errors import NonFiniteLossError
from indexcache_search.results.words import serving_flags
from sglang_indexcache.pattern.selection import Selection
from sglang_indexcache.process import exit_line

WIDE = 200  # columns where stdout is not a terminal


def messages(quiet: bool = False) -> Console:
    """Return the console for messages to people; it prints texts as they are, without markup."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=quiet)


def results() -> Console:
    """Return the console for results, as wide as the terminal or as `COLUMNS` says."""
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else WIDE
    return Console(highlight=False, markup=False, emoji=False, width=wide)


def command(*words: object) -> str:
    """Format a command line that can be copied."""
    return shlex.join(map(str, words))


def serving(pattern: object, model: object, selection: Selection | None) -> str:
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
