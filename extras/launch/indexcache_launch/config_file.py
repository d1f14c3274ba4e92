"""A `--config` file of a launch line, turned into words as SGLang does: they come before all others, which win."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from indexcache_launch.options import OptionError, OptionParser, own_merger, quiet
from sglang_indexcache.io.atomic import read_regular
from sglang_indexcache.io.errors import FileError

FLAG = "--config"
_LIMIT = 1 << 20
_BEFORE_JSON = ("0.5.11", "0.5.13.post1")  # a mapping became Python's text of it
_ALL_NAMES = ("0.5.23",)  # keys may be any long name of a flag, not only its attribute


def merged(words: Sequence[str], parser: OptionParser) -> list[str]:
    """Return the words of a launch line with those of its `--config` file in front, in the place of the flag.

    Raises:
        OptionError: if SGLang would not start with that file.
    """
    if FLAG not in words:  # `--config=FILE` and abbreviations are left alone, as SGLang leaves them
        return list(words)
    merger = own_merger(parser)
    if merger is None:
        return _merged(words, parser)
    try:
        with quiet():
            found: list[str] = merger.merge_config_with_args(list(words))
    except Exception as error:
        raise OptionError(f"{FLAG}: {' '.join(str(error).split())[:200] or type(error).__name__}") from None
    return found


def _merged(words: Sequence[str], parser: OptionParser) -> list[str]:
    place = words.index(FLAG)
    if words.count(FLAG) > 1:
        raise OptionError(f"{FLAG} is given twice, and SGLang reads one file")
    if place + 1 == len(words):
        raise OptionError(f"{FLAG} has no file behind it")
    name = words[place + 1]
    return [*_words(_read(name), parser, name), *words[:place], *words[place + 2 :]]


def _read(name: str) -> dict[str, Any]:
    if Path(name).suffix.lower() not in (".yaml", ".yml"):
        raise OptionError(f"{FLAG} {name}: SGLang reads files that end in .yaml or .yml")
    try:
        content = yaml.safe_load(read_regular(Path(name), _LIMIT).decode())
    except FileError as error:
        raise OptionError(f"{FLAG} {error}") from None
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise OptionError(f"{FLAG} {name}: not YAML: {' '.join(str(error).split())[:150]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"{FLAG} {name}: found {type(content).__name__}, expected flags and their values")
    return content


def _words(content: dict[Any, Any], parser: OptionParser, name: str) -> Iterator[str]:
    switches, refused = _switches(parser), _refused(parser)
    for key, value in content.items():
        if not isinstance(key, str):
            raise OptionError(f"{FLAG} {name}: key {key!r} is {type(key).__name__}, expected the name of a flag")
        plain = key.replace("-", "_")
        if plain in refused:
            raise OptionError(f"{FLAG} {name}: SGLang {parser.version} does not take {key} from a file")
        if isinstance(value, bool):
            if plain not in switches:
                yield from (f"--{key}", str(value).lower())
            elif value:
                yield f"--{key}"
        elif isinstance(value, list):
            yield from (f"--{key}", *map(str, value)) if value else ()
        elif isinstance(value, dict) and parser.version not in _BEFORE_JSON:
            yield from (f"--{key}", json.dumps(value))
        else:
            yield from (f"--{key}", str(value))


def _switches(parser: OptionParser) -> frozenset[str]:
    """Return the keys that are flags without a value."""
    found = (action for action in parser.flags().values() if isinstance(action, argparse._StoreTrueAction))
    return frozenset(key for action in found for key in _keys(parser, action))


def _refused(parser: OptionParser) -> frozenset[str]:
    """Return the keys that SGLang refuses in a file: flags of another kind than one with a value, or with none."""
    known = frozenset(parser.flags().values())
    taken = {action for action in known if _is_plain(parser, action)}
    read = {key for action in taken for key in _keys(parser, action)}
    found = {key for action in known - taken for key in _keys(parser, action)}
    return frozenset(found - read - {"config", "help"} if parser.version in _ALL_NAMES else found - {"config", "help"})


def _is_plain(parser: OptionParser, action: argparse.Action) -> bool:
    if isinstance(action, argparse._StoreTrueAction | argparse._StoreAction):
        return True
    return parser.version in _ALL_NAMES and action.nargs is None


def _keys(parser: OptionParser, action: argparse.Action) -> set[str]:
    long = {flag[2:].replace("-", "_") for flag in action.option_strings if flag.startswith("--")}
    return {action.dest} | (long if parser.version in _ALL_NAMES else set())
