"""What all command lines are made of: help in groups, `--config`, `--version`, options that left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import sglang_indexcache
from indexcache_search.config import read_config

MODEL, DATA, SEARCH, ENGINE, OUTPUT = "Model", "Data", "Search", "Engine", "Output"
REMOVED: dict[str, str] = {}
"""What stands for options of earlier versions, for whoever still gives them."""


class Command(TyperCommand):
    """A command whose help has its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(option, "rich_help_panel", None) or OUTPUT, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # where typer's class for it is depends on its version
            name = getattr(error, "option_name", "")
            if name in REMOVED:
                vars(error).update(message=f"no such option: {name}; {REMOVED[name]}", possibilities=None)
            raise


def application() -> typer.Typer:
    """Make an application whose output is plain text, and whose errors are ours to show."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def context_settings(**more: Any) -> dict[str, Any]:
    """Settings of a command's context."""
    return {"help_option_names": ["-h", "--help"], "max_content_width": 110, **more}


def _show_version(context: typer.Context, value: bool) -> None:
    if value:
        typer.echo(f"{context.info_name} {sglang_indexcache.__version__}")
        raise typer.Exit


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",  # typer 0.27 takes a metavar that is the name for the flag
        metavar="FILE",
        help="YAML file with options of this command; flags win over it (docs/search.md).",
        callback=read_config,
        is_eager=True,
        rich_help_panel=OUTPUT,
    ),
]
Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Print the version and end.", callback=_show_version, is_eager=True, rich_help_panel=OUTPUT
    ),
]
