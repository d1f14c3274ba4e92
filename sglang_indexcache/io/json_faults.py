"""Explain in a line why a file is not JSON, and what to do: cut off, with a comment, a page, or something else."""

from __future__ import annotations

import codecs
import json
import re

from sglang_indexcache.io.other_kinds import other_kind

_CUT_OFF = "not JSON: is cut off before its end; expected the whole file"
_BEGUN = re.compile(r"t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?|[.eE]?[+-]?")  # a word or number that is cut off, or nothing
_COMMENTS = ("//", "/*", "#")


def why_no_json(data: bytes, error: BaseException) -> str:
    """Return why `data` is not JSON, and what is expected.

    Args:
        data: content of a file.
        error: what decoding or parsing it raised.
    """
    found = other_kind(data)
    if found is not None:
        return found
    if data.startswith(codecs.BOM_UTF8):
        return "begins with a byte order mark, which JSON must not; expected UTF-8 without one"
    if isinstance(error, UnicodeDecodeError) and error.reason != "unexpected end of data":
        return f"not JSON: not UTF-8 at byte {error.start}"
    if isinstance(error, UnicodeDecodeError):
        return _CUT_OFF
    if not isinstance(error, json.JSONDecodeError):
        return (
            f"not JSON: {'nested too deeply' if isinstance(error, RecursionError) else 'a number of too many digits'}"
        )
    text, at = error.doc.rstrip(), error.pos
    rest, before = text[at:], text[:at].rstrip()
    if _BEGUN.fullmatch(rest) or error.msg.startswith("Unterminated string"):
        return _CUT_OFF
    if at == 0 and not rest.startswith(_COMMENTS):
        return f"not JSON: begins with {text[:40]!r}"
    where = f"not JSON: line {error.lineno}"
    if rest.startswith(_COMMENTS):
        return f"{where} has a comment; expected none, JSON has no comments"
    if rest[0] == "," or (before.endswith(",") and rest[0] in "]}"):
        return f"{where} has a comma too many"
    if error.msg == "Extra data":
        return f"{where} goes on after the end of the JSON; expected one object"
    return f"{where}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:].removesuffix(' at')}"
