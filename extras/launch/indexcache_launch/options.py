"""The options of SGLang's launch line: of the installed one by its own parser, of others by a table.

The table, `options.json`, is made by `python -m scripts.tools.sglang_options` of the wheels of the versions that it
names. Both are parsers of `argparse`, which resolves abbreviations and aliases as SGLang does.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from sglang_indexcache.io.errors import IndexCacheError

_TABLE = Path(__file__).with_name("options.json")
_TYPES = {"int": int, "float": float, "json.loads": json.loads}
_MERGERS = ("sglang.srt.utils.server_args_config_parser", "sglang.srt.server_args_config_parser")


class OptionError(IndexCacheError):
    """Words of a launch line that SGLang's parser refuses."""


class OptionParser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process, and that sets nothing but what it is given.

    Attributes:
        version: of the SGLang whose options it has.
        own: whether they are those of the installed SGLang.
        defaults: what SGLang takes where nothing is given, by attribute of its server arguments.
    """

    def __init__(self, version: str, own: bool = False) -> None:
        super().__init__(prog="sglang", add_help=False)
        self.version, self.own = version, own
        self.defaults: dict[str, Any] = {}
        self.add_argument("-h", "--help", action="store_true")

    def error(self, message: str) -> NoReturn:
        """Raise the parser's line.

        Raises:
            OptionError: always.
        """
        raise OptionError(message)

    def forget_defaults(self) -> OptionParser:
        """Move the options' defaults to `defaults`, and require none; return itself."""
        for action in self._actions:
            self.defaults.setdefault(action.dest, None if action.default is argparse.SUPPRESS else action.default)
            action.default, action.required = argparse.SUPPRESS, False
        return self

    def is_option(self, word: str) -> bool:
        """Return whether `argparse` takes a word for an option rather than for a value."""
        try:
            return word == "--" or self._parse_optional(word) is not None
        except OptionError:  # an abbreviation of several
            return True

    def flags(self) -> Mapping[str, argparse.Action]:
        """Return the actions by their flags."""
        return self._option_string_actions


@cache
def versions() -> tuple[str, ...]:
    """Return the versions whose options the table has, the oldest first."""
    return tuple(_table()["versions"])


@cache
def parser_of(version: str) -> OptionParser:
    """Return a parser with the options of a version of the table."""
    parser = OptionParser(version)
    for option in _table()["options"]:
        if version in option["versions"]:
            parser.add_argument(*option["names"], **_keywords(option))
    return parser.forget_defaults()


@cache
def installed_parser(version: str) -> OptionParser | None:
    """Return a parser with the options of the installed SGLang, which is imported; `None` if that fails."""
    try:
        arguments = import_module("sglang.srt.server_args").ServerArgs
        parser = OptionParser(version, own=True)
        arguments.add_cli_args(parser)
    except (Exception, SystemExit):  # whatever an environment without a GPU, or half of one, does
        return None
    return parser.forget_defaults()


def own_merger(parser: OptionParser) -> Any:
    """Return the installed SGLang's object that reads `--config` files; `None` if it can't be had."""
    for module in _MERGERS if parser.own else ():
        try:
            return import_module(module).ConfigArgumentMerger(parser)
        except Exception:  # noqa: S112  (one of the two places, or neither)
            continue
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what SGLang logs of old flags out of sight while we read a line: it logs it again when it does."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_TABLE.read_text())
    return found


def _keywords(option: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `add_argument` for an option of the table."""
    keywords: dict[str, Any] = {"dest": option["dest"], "default": option.get("default")}
    action = option["action"]
    if action == "true":
        return {**keywords, "action": "store_true"}
    if action == "boolean":
        return {**keywords, "action": argparse.BooleanOptionalAction}
    keywords |= {name: option[name] for name in ("choices", "nargs") if name in option}
    if option.get("type") in _TYPES:
        keywords["type"] = _TYPES[option["type"]]
    if action == "store":
        return keywords | ({"const": option["const"]} if "const" in option else {})
    if action == "list":
        return {**keywords, "action": _Old, "nargs": option.get("nargs", "*")}
    if action == "old store":
        return {**keywords, "action": _Old}
    value = option.get("const", True)  # "old true", "old const", "retired"
    return {**keywords, "action": _Old, "nargs": None if "choices" in option else 0, "const": value}


class _Old(argparse.Action):
    """An action of a class of SGLang's own: it stores its value, or `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values if self.const is None else self.const)
