"""The requested pattern of an engine, and the form in which server arguments carry it to the schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.refusal import PATTERN_VARIABLE
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.sglang.requested import KEY, CarriedPattern, Request


def wanted(request: Request) -> PatternSpec | None:
    """Return the pattern that an engine requests; `None` for the model's own.

    In a process that has it from the server arguments it has no file, since the main process checked that.

    Raises:
        IndexCacheError: if it can't be used, or the environment and the engine's own overrides differ.
    """
    if request.carried is not None:
        return _spelled(request.carried.source, request.carried.key)
    own, asked = request.own, request.asked.pattern
    in_overrides = None if own is None else _read(own) if isinstance(own, str) else _read_back(own)
    if asked is None:
        return in_overrides
    found = _read(asked)
    if in_overrides is not None and in_overrides.known() != found.known():
        raise IndexCacheError(
            f"{PATTERN_VARIABLE} asks for {found.known()}, the {KEY} section of the model overrides for"
            f" {in_overrides.known()}; expected one of them"
        )
    return found


def carried(spec: PatternSpec | None) -> CarriedPattern | None:
    """Return the form of a pattern in server arguments; `None` for the model's own."""
    return None if spec is None else CarriedPattern(source=spec.text, key=spec.known().key)


def _read(text: str) -> PatternSpec:
    spec = PatternSpec.read(text)
    spec.known()  # refuses what only a model says
    return spec


def _read_back(section: Any) -> PatternSpec:
    if not isinstance(section, Mapping) or set(section) != {"source", "pattern"}:
        raise IndexCacheError(f"the {KEY} section of the model overrides is not a pattern, nor its source and key")
    return _spelled(str(section["source"]), str(section["pattern"]))


def _spelled(source: str, key: str) -> PatternSpec:
    return PatternSpec(source, letters=Pattern.from_key(key))
