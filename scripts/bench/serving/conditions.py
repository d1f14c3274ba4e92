"""Conditions of a comparison: with which pattern, by whom, and with which arguments SGLang is started.

A condition is `NAME=LETTERS`, or `NAME=LETTERS ++ JSON`. `F*16` is 16 F; no letters, or `plain` in their place, are
SGLang without a pattern, and `plain` alone is `plain=plain`. JSON are arguments of `sglang.Engine` for this condition:
they win over those of all, `null` leaves one of those out, and `env` has variables of the environment. Words of a name
behind a `-` say how a pattern is served: `alone` with `--indexcache-no-grouping`, `sharded` with
`--indexcache-shard-indexers`, and a name that ends with `-switch` by SGLang itself, whose switch is written as this
version reads it, without the plugin.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.refusal import GROUPING_VARIABLE, PATTERN_VARIABLE, SHARD_VARIABLE

PLAIN = "plain"
_OVERRIDE, _ENVIRONMENT = "json_model_override_args", "env"
_NAME = re.compile(r"[\w.-]+")
_BALANCE = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"  # neighbours that load take memory from one rank before another
_ERROR = re.compile(r"\w*(Error|Exception)\b|indexcache: |[Rr]efus|out of memory")
_ECHO = re.compile(r"died|[Ss]igquit|EOFError|SystemExit|shutdown|Broken pipe")  # of a process that another one ended
_PORTS, _ROOM = range(10000, 22000), 400  # SGLang draws its own from 22000 on, and derives some from its first one
_DERIVED = (0, 1, *range(233, 250))


@dataclass(frozen=True)
class Condition:
    """How one engine or server is started.

    Attributes:
        name: of the row, and of the log.
        pattern: what it serves; `None` for SGLang without one.
        arguments: of `sglang.Engine`, for this condition alone.
    """

    name: str
    pattern: Pattern | None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition of a command line.

        Raises:
            ArgumentTypeError: with one line.
        """
        head, more, content = text.partition(" ++ ")
        name, given, letters = head.strip().partition("=")
        if not _NAME.fullmatch(name) or (not given and name != PLAIN):
            raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=LETTERS, NAME=LETTERS ++ JSON, or {PLAIN}")
        letters = re.sub(r"([FS])\*(\d+)", lambda match: match[1] * int(match[2]), letters.strip())
        try:
            arguments = json.loads(content) if more else {}
            pattern = None if letters in ("", PLAIN) else Pattern.parse(letters)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from None
        if not isinstance(arguments, dict):
            raise argparse.ArgumentTypeError(f"{name}: found {content}, expected a JSON object behind ++")
        condition = cls(name, pattern, arguments)
        if condition.switch and (pattern is None or pattern.letters != pattern.roles):
            raise argparse.ArgumentTypeError(
                f"{name}: SGLang's switch takes F and S, found {letters or 'no letters'!r}"
            )
        return condition

    @property
    def switch(self) -> bool:
        """Whether SGLang serves the pattern without the plugin."""
        return self.name.endswith("-switch")

    @property
    def proven(self) -> str | None:
        """The letters that the plugin must have proven; `None` where it serves nothing."""
        return None if self.pattern is None or self.switch else self.pattern.letters

    def engine(self, common: Mapping[str, Any], model: Path) -> dict[str, Any]:
        """Return the arguments of `sglang.Engine` for the model in a folder.

        Args:
            common: arguments of all conditions.
            model: folder with config.json.
        """
        merged = {**common, **self.arguments}
        merged.pop(_ENVIRONMENT, None)
        if self.switch and self.pattern is not None:
            given = merged.get(_OVERRIDE) or {}
            overrides = json.loads(given) if isinstance(given, str) else given
            config = json.loads((model / "config.json").read_text())
            adapter = family_of(describe(config, model.name).architecture).sglang
            merged[_OVERRIDE] = json.dumps({**overrides, **adapter.to_overrides(overrides, self.pattern)})
        return {name: value for name, value in merged.items() if value is not None}

    def environment(self, model: Path, folder: Path) -> dict[str, str]:
        """Return the environment to start it in, with a pattern file in `folder` where the plugin serves one."""
        words = self.name.split("-")[1:]
        found = {name: value for name, value in os.environ.items() if name != PATTERN_VARIABLE}
        if self.pattern is not None and not self.switch:
            found[PATTERN_VARIABLE] = write_pattern(self.pattern, model, folder / f"{self.name}.yaml")
        found[GROUPING_VARIABLE] = "1" if "alone" in words else "0"
        found[SHARD_VARIABLE] = "1" if "sharded" in words else "0"
        found.setdefault(_BALANCE, "false")
        return found | {name: str(value) for name, value in self.arguments.get(_ENVIRONMENT, {}).items()}


def checked(conditions: Sequence[Condition], model: Path, common: Mapping[str, Any]) -> None:
    """Refuse what would only fail once engines start.

    Raises:
        ValueError: with one line, if two have a name, or a pattern is of another model.
    """
    names = [condition.name for condition in conditions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice}: two conditions have this name")
    config = json.loads((model / "config.json").read_text())
    for condition in conditions:
        try:
            if condition.pattern is not None:
                condition.pattern.check_fits(describe(config, model.name).num_layers)
            condition.engine(common, model)
        except IndexCacheError as error:
            raise ValueError(f"{condition.name}: {error}") from None


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Write arguments of SGLang's engine as those of its server."""
    for name, value in arguments.items():
        if value is False:
            continue
        yield "--" + name.replace("_", "-")
        if value is not True:
            yield from (
                map(str, value)
                if isinstance(value, list)
                else [json.dumps(value) if isinstance(value, dict) else str(value)]
            )


def ports() -> Iterator[dict[str, int]]:
    """Yield `port` and `nccl_port` of one engine after the other, side by side on this machine.

    SGLang binds them minutes after it has looked whether they are free, so engines that draw their own can meet, and so
    could those of two runs: keep the iterator until engines are up, it holds a port of each.
    """
    starts = [*range(_PORTS.start, _PORTS.stop, _ROOM)]
    with ExitStack() as held:
        for start in random.sample(starts, len(starts)):
            last = held.enter_context(socket.socket())
            with suppress(OSError):
                last.bind(("127.0.0.1", start + _ROOM - 1))
                if _free(start + offset for offset in _DERIVED):
                    yield {"port": start, "nccl_port": start + 1}


def _free(numbers: Iterable[int]) -> bool:
    with ExitStack() as stack, suppress(OSError):
        for number in numbers:
            stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
        return True
    return False


def last_error(log: str) -> str:
    """Return the line of a log that says best why its process ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    own = [line for line in errors if not _ECHO.search(line)]
    return (own or errors or lines or ["no output"])[-1][:300]
