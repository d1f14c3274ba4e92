"""Options of commands whose values an extension reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Annotated, Any, TypeVar

import typer

from indexcache_search.cli.command import option, settings
from indexcache_search.eval.extra import ExtraComparison
from sglang_indexcache.io.extensions import ExtensionError, extensions

Function = TypeVar("Function", bound=Callable[..., None])


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


def with_options(extras: Mapping[str, ExtraComparison]) -> Callable[[Function], Function]:
    """Give a command's function an option for each comparison of an extension, in the place of its `**` parameter.

    Raises:
        ExtensionError: if one has a name that an option can't have, or that another one has.
    """

    def changed(function: Function) -> Function:
        plain = signature(function, eval_str=True)
        kept = [item for item in plain.parameters.values() if item.kind is not Parameter.VAR_KEYWORD]
        hints = {
            name: Annotated[item.kind | None, settings(item.kind, item.help, item.first)]
            for name, item in extras.items()
        }
        try:
            added = [
                Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint) for name, hint in hints.items()
            ]
            whole = plain.replace(parameters=[*kept, *added])
        except ValueError as error:
            raise ExtensionError(f"an extension of indexcache.comparisons: {error}; expected another name") from None
        function.__annotations__ = {name: item.annotation for name, item in whole.parameters.items()} | {"return": None}
        vars(function).update(__signature__=whole)
        return function

    return changed


def _refuse(value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter("needs an extension that is not installed")
