"""Parts of all command lines: grouped options, `--config`, `--version`, errors in one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Typer

import sglang_indexcache
from indexcache_search.cli.bounded import Bounds
from indexcache_search.cli.config import SETTINGS, paths, read_config
from indexcache_search.cli.groups import group, hint_for
from indexcache_search.cli.help import HELP_OPTIONS, HelpfulCommand
from indexcache_search.console import errors_in_one_line, messages
from indexcache_search.errors import SearchError
from sglang_indexcache.io.redaction import HIDDEN, redacted

WORDS = "words"  # key in `context.meta` for the command line
_SECRET = re.compile(r"--([\w-]+[-_])?(key|token|password|secret)")


class Command(HelpfulCommand):
    """A command that hints at the option that has an unknown flag as a setting, and takes no empty path."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; an error ends in one line."""
        ctx.meta[WORDS] = tuple(args)
        with errors_in_one_line(messages(), ctx.command_path):
            flags = {"--" + name.replace("_", "-") for name in paths(self.callback)}
            for before, word in pairwise(("", *args)):
                given = word or f"{before}="
                if given.endswith("=") and given[:-1] in flags:
                    raise SearchError(f"{given[:-1]} is empty, expected a path")
            try:
                return super().parse_args(ctx, args)
            except Exception as error:  # the module of typer's class for it depends on the version
                name = getattr(error, "option_name", "")
                hint = hint_for(self.callback, name)
                if hint:
                    vars(error).update(message=f"No such option: {name}; {hint}", possibilities=None)
                raise


def application(functions: Mapping[str, Callable[..., None]], epilog: str = "", help: str = "", **more: Any) -> Typer:
    """Make an application of commands by name, with plain text output and our own error lines.

    Each parameter of a function is an option. `epilog`: see `HelpfulCommand`; `more`: settings of commands' contexts.
    """
    app = Typer(help=help, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    context = {**HELP_OPTIONS, "max_content_width": 110, **more}
    for name, function in functions.items():
        app.command(name, cls=Command, epilog=epilog, context_settings=context)(function)
    return app


@dataclass(frozen=True)
class OptionNeed:
    """A condition under which an option is read.

    Attributes:
        words: names the condition in messages, behind "needs".
        met: returns true if the values of all options fulfil it.
    """

    words: str
    met: Callable[[Mapping[str, Any]], bool]


def _refuse_unread(context: typer.Context, needs: Mapping[str, tuple[OptionNeed, ...]]) -> None:
    for name, its_needs in needs.items():
        value, source = context.params[name], context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        flag = "--" + ("no-" if value is False else "") + name.replace("_", "-")
        shown = f"{context.params['config']}: {name}" if source.name == "DEFAULT_MAP" else flag
        for need in its_needs:
            if not need.met(context.params):
                raise SearchError(f"{shown} needs {need.words}")


@contextmanager
def running(
    context: typer.Context, needs: Mapping[str, tuple[OptionNeed, ...]], quiet: bool = False
) -> Iterator[Console]:
    """Refuse options that were given without what they need, and report any error as one line and an exit code."""
    console = messages(quiet)
    with errors_in_one_line(console, context.command_path):
        _refuse_unread(context, needs)
        yield console


def command_line(context: typer.Context) -> str:
    """Return the command line without secrets, so that it can be published and copied."""
    shown = []
    for before, word in pairwise(("", *context.meta[WORDS])):
        flag, mark, _ = word.partition("=")
        if _SECRET.fullmatch(before):
            shown.append(HIDDEN)
        else:
            shown.append(f"{flag}={HIDDEN}" if mark and _SECRET.fullmatch(flag) else redacted(word))
    return shlex.join([context.command_path, *shown])


def option(help: str, *names: str, **more: Any) -> Any:
    """Make an option. Its name must be given where it equals the metavar, since typer 0.27 confuses the two."""
    return typer.Option(*names, help=help, **more)


def number(help: str, bounds: Bounds) -> Any:
    """Make an option for numbers within bounds."""
    return option(help, callback=bounds.check)


def settings(kind: type, help: str, first: str = "") -> Any:
    """Make an option for the fields of the frozen dataclass `kind`, see `groups`; `first` may stand alone."""
    return option(help, parser=group(kind), metavar=f"{first}:{SETTINGS}" if first else SETTINGS)


def _show_version(context: typer.Context, value: bool) -> None:
    if value:
        typer.echo(f"{context.info_name} {sglang_indexcache.__version__}")
        raise typer.Exit


Config = Annotated[
    Path | None, option("YAML file with options by name; flags win over it.", callback=read_config, is_eager=True)
]
Version = Annotated[bool, option("Print the version.", "--version", callback=_show_version, is_eager=True)]
