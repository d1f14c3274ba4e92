"""What extensions let indexcache-eval do behind its own comparison, or in the place of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_indexcache.http.address import Address
from sglang_indexcache.io.extensions import extensions


@dataclass(frozen=True, kw_only=True)
class ExtraJob:
    """What is to be compared.

    Attributes:
        settings: of the option, of the extension's `kind`.
        model: folder or hub id.
        endpoints: servers; the first is the baseline.
        output: folder of the results.
        console: for messages.
        beside: keep the other results in `output`: the same command has just written them.
    """

    settings: Any
    model: str
    endpoints: tuple[Address, ...]
    output: Path
    console: Console
    beside: bool


@dataclass(frozen=True, kw_only=True)
class ExtraComparison:
    """A comparison that `--NAME` asks for; NAME is that of its entry point of the group `indexcache.comparisons`.

    Attributes:
        kind: the frozen dataclass of the option's settings.
        help: text for `--help`.
        first: see `cli.command.settings`.
        example: of its use, for the end of `--help`.
        needs: flags of indexcache-eval without which the option is refused, such as `--endpoint`.
        gate: what of its settings ends the command with exit code 1, in the words of `--help`; empty for nothing.
        files: names of all files that it may write into the folder `--output`.
        check: raises an `IndexCacheError` for what is known to be wrong before anything takes long.
        run: compares, writes and prints; returns true if the command is to end with exit code 1.
    """

    kind: type
    help: str
    first: str = ""
    example: str = ""
    needs: tuple[str, ...] = ()
    gate: str = ""
    files: tuple[str, ...]
    check: Callable[[ExtraJob], None]
    run: Callable[[ExtraJob], bool]


def comparisons() -> Mapping[str, ExtraComparison]:
    """Return the comparisons of extensions, by name.

    Raises:
        ExtensionError: if an extension can't be loaded.
    """
    return extensions("comparisons", ExtraComparison)
