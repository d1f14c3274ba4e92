"""Settings that a launch asks of us: by our flags, which become variables, or by the variables themselves."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Self

from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.refusal import (
    ALLOW_MISMATCH_VARIABLE,
    CALIBRATE_VARIABLE,
    GROUPING_FLAG,
    GROUPING_VARIABLE,
    PATTERN_VARIABLE,
    SHARD_FLAG,
    SHARD_VARIABLE,
    UNION_FLAG,
    UNION_VARIABLE,
    UNREAD_FLAG,
    UNREAD_VARIABLE,
    refuse,
)

PATTERN_FLAG = "--indexcache-pattern"
CALIBRATE_FLAG = "--indexcache-calibrate"
_SWITCHES = {  # by the attribute of `Asked`: flag and variable
    "allow_mismatch": ("--indexcache-allow-config-mismatch", ALLOW_MISMATCH_VARIABLE),
    "shard": (SHARD_FLAG, SHARD_VARIABLE),
    "unions": (UNION_FLAG, UNION_VARIABLE),
    "ungrouped": (GROUPING_FLAG, GROUPING_VARIABLE),
    "allow_unread": (UNREAD_FLAG, UNREAD_VARIABLE),
    "calibrate": (CALIBRATE_FLAG, CALIBRATE_VARIABLE),
}
_OFF = ("", "0")  # values of a variable that is off
_PREFIX = "--indexcache"


class LaunchError(IndexCacheError):
    """A command line or environment in which the pattern would not be served."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings that one engine is asked for.

    Attributes:
        pattern: name of the pattern to serve, if any.
        allow_mismatch: whether its file may be made for another config.json.
        shard: whether ranks share out the rows of prompts.
        unions: whether prompts attend over unions of neighbours' selections.
        ungrouped: whether each query of a block is attended from alone.
        allow_unread: whether methods of SGLang may be replaced whose source nobody has read.
        calibrate: whether patterns are switched for a search instead.
    """

    pattern: str | None = None
    allow_mismatch: bool = False
    shard: bool = False
    unions: bool = False
    ungrouped: bool = False
    allow_unread: bool = False
    calibrate: bool = False

    @property
    def without_pattern(self) -> bool:
        """Whether something is asked for that is served on a model's own pattern, too."""
        return self.shard or self.unions

    @classmethod
    def of_environment(cls) -> Self:
        """Read the variables; one that is neither on nor off, or contradicts another, ends the process."""
        asked = cls(
            pattern=os.environ.get(PATTERN_VARIABLE) or None,
            **{name: _is_on(variable) for name, (_, variable) in _SWITCHES.items()},
        )
        for variable, given in (
            (PATTERN_VARIABLE, asked.pattern),
            (SHARD_VARIABLE, asked.shard),
            (UNION_VARIABLE, asked.unions),
        ):
            if given and asked.calibrate:
                refuse(f"{variable} and {CALIBRATE_VARIABLE} are set, expected one of them")
        return asked

    def beside(self, variables: Mapping[str, str]) -> Self:
        """Return what is asked for by these flags and by variables in front of them; a value that is no 1 is off."""
        on = {name: getattr(self, name) or variables.get(variable) == "1" for name, (_, variable) in _SWITCHES.items()}
        return replace(self, pattern=self.pattern or variables.get(PATTERN_VARIABLE), **on)

    def to_environment(self) -> None:
        """Set the variables of all that is asked for; that of a mismatch is also switched off."""
        os.environ[ALLOW_MISMATCH_VARIABLE] = "0"
        os.environ.update({variable: "1" for name, (_, variable) in _SWITCHES.items() if getattr(self, name)})
        if self.pattern is not None:
            os.environ[PATTERN_VARIABLE] = self.pattern


def environment_asks() -> bool:
    """Return whether the environment asks for anything now."""
    on = (os.environ.get(variable, "") not in _OFF for variable in (CALIBRATE_VARIABLE, SHARD_VARIABLE, UNION_VARIABLE))
    return bool(os.environ.get(PATTERN_VARIABLE)) or any(on)


def _is_on(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in (*_OFF, "1"):
        refuse(f"{variable} is {value!r}, expected 1 or 0")
    return value == "1"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def split_arguments(arguments: Sequence[str]) -> tuple[Asked, tuple[str, ...]]:
    """Split off our flags, which can't be abbreviated; leave all other words for SGLang's own parser.

    Raises:
        LaunchError: if the pattern flag has no value, is given twice or with the calibration flag, or if a flag is
            almost one of ours.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(PATTERN_FLAG, action="append", default=[], dest="patterns")
    for name, (flag, _) in _SWITCHES.items():
        parser.add_argument(flag, action="store_true", dest=name)
    ours, rest = parser.parse_known_args(list(arguments))
    patterns = vars(ours).pop("patterns")
    for word in rest:
        if word.replace("_", "-").startswith(_PREFIX):
            flags = ", ".join((PATTERN_FLAG, *(flag for flag, _ in _SWITCHES.values())))
            raise LaunchError(f"{word.partition('=')[0]} is no flag, expected one of {flags}")
    if not all(patterns) or "--" in patterns:  # of which argparse makes an empty list up to Python 3.11
        raise LaunchError(f"{PATTERN_FLAG} has no value, expected a pattern file")
    if len(patterns) > 1:
        raise LaunchError(f"{PATTERN_FLAG} is given twice")
    for flag, given in (
        (PATTERN_FLAG, patterns),
        (SHARD_FLAG, ours.shard),
        (UNION_FLAG, ours.unions),
        (GROUPING_FLAG, ours.ungrouped),
    ):
        if given and ours.calibrate:
            raise LaunchError(f"{flag} and {CALIBRATE_FLAG} are given, expected one of them")
    return Asked(pattern=next(iter(patterns), None), **vars(ours)), tuple(rest)
