"""A launch line of SGLang: what its flags say, read as SGLang's parser reads them, and what could not be read."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from indexcache_launch import config_file
from indexcache_launch.options import OptionError, OptionParser, installed_parser, parser_of, quiet, versions
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.sglang.probes import SglangSource

_RENAMED = {  # attributes of older parsers, which SGLang renames as soon as it has parsed
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "expert_parallel_size": "ep_size",
    "moe_data_parallel_size": "moe_dp_size",
    "attention_context_parallel_size": "attn_cp_size",
}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PROGRAMS = (("-m", "sglang.launch_server"), ("-m", "sglang_indexcache.launch_server"), ("sglang", "serve"))


@dataclass(frozen=True)
class Unread:
    """Flag of a launch line that SGLang's parser would refuse, or SGLang would not read.

    Attributes:
        name: the flag.
        why: one line.
    """

    name: str
    why: str


@dataclass(frozen=True)
class LaunchLine:
    """Flags of a launch line under the names of SGLang's server arguments; any other attribute is `None`.

    Attributes:
        given: values of the flags that are there, of a `--config` file, too.
        spelled: how each was written, `--speculative-algo`.
        unread: what could not be read.
        plain: the given ones whose value is SGLang's default.
        version: of the SGLang whose parser read it.
    """

    given: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()
    plain: frozenset[str] = frozenset()
    version: str = ""

    @classmethod
    def parse(cls, words: Sequence[str], parser: OptionParser | None = None) -> LaunchLine:
        """Read words as `parser` does, without it as the newest version of the table; the last one of a flag wins."""
        parser = parser or parser_of(versions()[-1])
        unread: list[Unread] = []
        try:
            words = config_file.merged(words, parser)
        except OptionError as error:
            unread.append(Unread(config_file.FLAG, str(error)))
            words = _without_config(words)
        given = argparse.Namespace()
        spelled: dict[str, str] = {}
        with quiet():
            for chunk in _chunks(words, parser):
                before = dict(vars(given))
                unread += _read(chunk, parser, given)
                for name, value in vars(given).items():
                    if name not in before or before[name] is not value:
                        spelled[_RENAMED.get(name, name)] = chunk[0].partition("=")[0]
        values = {_RENAMED.get(name, name): value for name, value in vars(given).items()}
        plain = frozenset(
            _RENAMED.get(name, name)
            for name, value in vars(given).items()
            if value is not None and value == parser.defaults.get(name)
        )
        if values.pop("config", None) is not None:
            why = f"SGLang reads a file behind {config_file.FLAG} as a word of its own alone: it would be ignored"
            unread.append(Unread(spelled["config"], why))
        return cls(values, spelled, tuple(unread), plain, parser.version)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.given.get(name)


@dataclass(frozen=True)
class Readings:
    """A launch line, as each SGLang that it may be meant for reads it.

    Attributes:
        lines: one for each version whose parser takes every word of it; if none does, of those that take the most.
        others: for each other version, what it could not read.
        own: whether the installed SGLang's own parser read it.
        doubt: why it was not read as the SGLang at hand does, one line; empty if it was, or if there is none.
    """

    lines: tuple[LaunchLine, ...]
    others: dict[str, tuple[Unread, ...]]
    own: bool = False
    doubt: str = ""

    @classmethod
    def of(cls, words: Sequence[str], source: SglangSource | None, importing: bool = True) -> Readings:
        """Read words as an SGLang does; as all versions of the table if it is `None`, or none of them.

        Args:
            words: of the launch line, without the program.
            source: the installed SGLang, which is imported, or an unpacked one, which is not.
            importing: whether the installed one may be imported, which takes seconds.
        """
        parsers, doubt = [parser_of(version) for version in versions()], ""
        if source is not None:
            installed = SglangSource.installed()
            imported = importing and installed is not None and installed.root == source.root
            own = installed_parser(source.version) if imported else None
            of_version = [item for item in parsers if item.version == source.version]
            if own is None and imported:
                doubt = f"the parser of SGLang {source.version} can't be imported here; a table of options was read"
            if own is None and not of_version:
                doubt = f"the options of SGLang {source.version} are not known without importing it; others were read"
            parsers = [own] if own else of_version or parsers
        found = tuple(LaunchLine.parse(words, parser) for parser in parsers)
        fewest = min(len(line.unread) for line in found)
        kept = tuple(line for line in found if len(line.unread) == fewest)
        return cls(kept, {line.version: line.unread for line in found if line not in kept}, parsers[0].own, doubt)


def split_text(text: str) -> tuple[dict[str, str], list[str]]:
    """Split a launch line as a shell does into variables in front of it, and the words behind the program.

    `A=1 python -m sglang.launch_server --tp 8` and `sglang serve --tp 8` are taken, and flags alone.

    Raises:
        IndexCacheError: if a quote is not closed.
    """
    try:
        words = shlex.split(re.sub(r"\\\s*\n", " ", text))
    except ValueError as error:
        raise IndexCacheError(f"a launch line: {error}; expected the words as in a shell") from None
    pairs = ((Path(before).name, word) for before, word in pairwise(words))
    first = next((place for place, pair in enumerate(pairs, 1) if pair in _PROGRAMS), -1)
    head, rest = words[: first + 1], words[first + 1 :]
    if first < 0:
        while rest and _ASSIGNMENT.fullmatch(rest[0]):
            head.append(rest.pop(0))
    return {match[1]: match[2] for word in head if (match := _ASSIGNMENT.fullmatch(word))}, rest


def _without_config(words: Sequence[str]) -> list[str]:
    """Return the words without `--config` and its file, of which something was said."""
    kept = list(words)
    while config_file.FLAG in kept:
        place = kept.index(config_file.FLAG)
        del kept[place : place + 2]
    return kept


def _chunks(words: Sequence[str], parser: OptionParser) -> Iterator[list[str]]:
    """Yield each option with the words behind it; behind `--` nothing is an option."""
    chunk: list[str] = []
    for word in words:
        if chunk[:1] != ["--"] and parser.is_option(word):
            if chunk:
                yield chunk
            chunk = []
        chunk.append(word)
    if chunk:
        yield chunk


def _read(chunk: list[str], parser: OptionParser, given: argparse.Namespace) -> Iterator[Unread]:
    """Add what an option sets to `given`, and yield what SGLang would not read; values are never shown."""
    name = chunk[0].partition("=")[0]
    if name.startswith("-") and not name.startswith("--") and name != "-h":
        name = "a word that begins with -"  # what follows may be a key
    try:
        _, left = parser.parse_known_args(chunk, given)
    except OptionError as error:
        yield Unread(name, _shortened(str(error)))
        return
    except Exception as error:  # an action of SGLang's that a value breaks
        yield Unread(name, f"SGLang's parser fails: {type(error).__name__}")
        return
    if left and left[0] == chunk[0] and chunk[0].startswith("-"):
        yield Unread(name, "no such flag")
    elif left and chunk[0].startswith("-"):
        yield Unread(name, f"{len(left)} {'word' if len(left) == 1 else 'words'} too many behind it")
    elif left:
        yield Unread("the first words", "they belong to no flag")


def _shortened(message: str) -> str:
    """Return one line of argparse's, at most six of the flags that an abbreviation may mean."""
    head, mark, tail = message.partition(" could match ")
    flags = tail.split(", ")
    if mark and len(flags) > 6:
        message = f"{head}{mark}{', '.join(flags[:6])} and {len(flags) - 6} more"
    return " ".join(message.split())[:400]
