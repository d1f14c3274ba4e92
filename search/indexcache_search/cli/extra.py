"""Options of commands whose values an extension reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from indexcache_search.cli.command import option, settings
from sglang_indexcache.io.extensions import extensions


@dataclass(frozen=True, kw_only=True)
class ExtraOption:
    """An option of commands, registered by an entry point of the group `indexcache.options`.

    Attributes:
        kind: the frozen dataclass of its settings.
        help: text for `--help`.
        first: see `settings`.
        example: of its use, for the end of `--help`.
    """

    kind: type
    help: str
    first: str = ""
    example: str = ""


def extra_option(name: str) -> Any:
    """Return the type of a parameter for the option that an extension registers as `name`; without it all is refused.

    Raises:
        ExtensionError: if an extension can't be loaded.
    """
    found: ExtraOption | None = extensions("options", ExtraOption).get(name)
    if found is None:
        return Annotated[str | None, option("Needs an extension that is not installed.", callback=_refuse)]
    return Annotated[found.kind | None, settings(found.kind, found.help, found.first)]


def example_of(name: str) -> str:
    """Return an example of the option that an extension registers as `name`, for the end of `--help`."""
    found: ExtraOption | None = extensions("options", ExtraOption).get(name)
    return "" if found is None else f"{found.example}\n"


def _refuse(value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter("needs an extension that is not installed")
