"""YAML 1.2 as a reviewer reads it: text that can't be seen on the page, or has two readings, is refused.

PyYAML only splits the text into events, since it reads YAML 1.1. This module resolves scalars by the core schema of
YAML 1.2 (section 10.3.2). Every scalar and flow collection stands on one line. A byte order mark, which editors on
Windows write, may begin the file (section 5.2).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any

import yaml

from sglang_indexcache.io.errors import PatternFileError, is_hidden
from sglang_indexcache.io.faults import other_kind

MAX_BYTES = 128 << 10  # PyYAML takes 2 s for as much
MAX_DEPTH = 8
MAX_DIGITS = 40

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_BASES = {"0o": (8, re.compile(r"0o[0-7]+")), "0x": (16, re.compile(r"0x[0-9a-fA-F]+"))}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_AFTER_QUOTES = " \n\0:,]}"
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


def load(data: bytes) -> Any:
    """Parse one YAML document.

    Raises:
        PatternFileError: with the line, what was found, and what would be right.
    """
    if len(data) > MAX_BYTES:
        raise PatternFileError(f"has {len(data)} bytes, expected at most {MAX_BYTES}")
    found = other_kind(data)
    if data.strip() and found is not None:
        raise PatternFileError(found)
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise PatternFileError(f"not UTF-8: byte {error.start}") from None
    _check_characters(text)
    events = _events(text)
    try:
        return _document(events)
    except RecursionError:  # raised by PyYAML's scanner
        raise PatternFileError("not a pattern file: nested too deeply") from None


def resolve(text: str) -> Any:
    """Resolve a plain scalar: to a string, unless the core schema says otherwise.

    Raises:
        PatternFileError: for a number that is too long, or that older readers take for an octal one.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if not (text[0] in "+-." or "0" <= text[0] <= "9"):
        return text
    number = _number(text)
    if number is not None and len(text) > MAX_DIGITS:
        raise PatternFileError(f"number {text[:20]}... has {len(text)} characters, expected at most {MAX_DIGITS}")
    if number is not None and _LEADING_ZERO.match(text):
        raise PatternFileError(f"number {text} begins with 0, which older readers take for octal; expected none")
    return text if number is None else number


def _number(text: str) -> int | float | None:
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    if len(text) > MAX_DIGITS:
        return 0 if _DECIMAL.fullmatch(text) or _FLOAT.fullmatch(text) or text[:2] in _BASES else None
    base, pattern = _BASES.get(text[:2], (10, _DECIMAL))
    if pattern.fullmatch(text):
        return int(text, base)
    return float(text) if _FLOAT.fullmatch(text) else None


def _check_characters(text: str) -> None:
    """Refuse line breaks that editors don't show, control characters and tabs: a reviewer can't see them."""
    for number, line in enumerate(text.split("\n"), 1):
        for letter in line:
            if not " " <= letter <= "~" and is_hidden(letter):
                raise PatternFileError(f"line {number}: character U+{ord(letter):04X} is not allowed")


def _events(text: str) -> Iterator[tuple[int, Any]]:
    """Yield events with the line where they begin."""
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            yield event.start_mark.line + 1, event  # type: ignore[union-attr]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise PatternFileError(f"{line}not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise PatternFileError(f"not YAML: {error}") from None


def _document(events: Iterator[tuple[int, Any]]) -> Any:
    next(events)  # the stream begins
    line, event = next(events)
    if isinstance(event, yaml.StreamEndEvent):
        return None
    if event.version or event.tags:
        raise PatternFileError(f"line {line}: directives are not allowed")
    value = _node(*next(events), events, 0)
    next(events)  # the document ends
    line, event = next(events)
    if not isinstance(event, yaml.StreamEndEvent):
        raise PatternFileError(f"line {line}: a second document is not allowed")
    return value


def _node(line: int, event: Any, events: Iterator[tuple[int, Any]], depth: int) -> Any:
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise PatternFileError(f"line {line}: anchors and aliases are not allowed")
    if event.tag is not None:
        raise PatternFileError(f"line {line}: tags are not allowed")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(line, event)
    if depth == MAX_DEPTH:
        raise PatternFileError(f"line {line}: nested too deeply, expected at most {MAX_DEPTH} levels")
    if isinstance(event, yaml.SequenceStartEvent):
        return _sequence(line, event, events, depth)
    return _mapping(line, event, events, depth)


def _scalar(line: int, event: Any) -> Any:
    if event.style in ("|", ">") or event.end_mark.line + 1 != line:
        raise PatternFileError(f"line {line}: a value of several lines is not allowed")
    if event.style is not None:
        end: Any = event.end_mark
        if end.buffer[end.pointer] not in _AFTER_QUOTES:
            raise PatternFileError(f"line {line}: something follows a closing quote")
        return event.value
    try:
        return resolve(event.value)
    except PatternFileError as error:
        raise PatternFileError(f"line {line}: {error}") from None


def _sequence(line: int, start: Any, events: Iterator[tuple[int, Any]], depth: int) -> list[Any]:
    items: list[Any] = []
    while True:
        at, event = next(events)
        if isinstance(event, yaml.SequenceEndEvent):
            _check_one_line(line, start, event)
            return items
        items.append(_node(at, event, events, depth + 1))


def _mapping(line: int, start: Any, events: Iterator[tuple[int, Any]], depth: int) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    while True:
        at, event = next(events)
        if isinstance(event, yaml.MappingEndEvent):
            _check_one_line(line, start, event)
            return mapping
        if not isinstance(event, yaml.ScalarEvent) or event.anchor or event.tag:
            raise PatternFileError(f"line {at}: keys must be words")
        start_of_key: Any = event.start_mark
        if start_of_key.buffer[: start_of_key.pointer].rstrip(" ").endswith("?"):
            raise PatternFileError(f"line {at}: keys with ? are not allowed")
        key = _scalar(at, event)
        if not isinstance(key, str):
            raise PatternFileError(f"line {at}: keys must be words, found {event.value}")
        if key in mapping:
            raise PatternFileError(f"line {at}: key {key!r} stands there twice")
        mapping[key] = _node(*next(events), events, depth + 1)


def _check_one_line(line: int, start: Any, end: Any) -> None:
    if start.flow_style and end.end_mark.line + 1 != line:
        raise PatternFileError(f"line {line}: brackets of several lines are not allowed, expected one item a line")
