"""Why a file is not what belongs there, and what to do: what downloads, git, editors and full disks leave."""

from __future__ import annotations

import codecs
import json
import re

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024
_TITLE = re.compile(rb"<title[^>]*>([^<]{0,200})", re.IGNORECASE)
_PAGES = (b"<!doctype html", b"<html", b"<?xml", b"<error")
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ZERO_BYTES_BETWEEN = re.compile(rb"[^\0]\0[^\0]\0|\0[^\0]\0[^\0]")
_PULL = "a Git LFS pointer, not the file itself; expected `git lfs pull` in that folder, or a download by `hf download`"
_CUT_OFF = "not JSON: is cut off before its end; expected the whole file"
_BEGUN = re.compile(r"t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?|[.eE]?[+-]?")  # a word or number that is cut off, or nothing
_COMMENTS = ("//", "/*", "#")


def other_kind(content: bytes) -> str | None:
    """Return what `content` is, and what is expected, if it is no text in UTF-8, or a page; `None` otherwise."""
    beginning = content[:_POINTER_BYTES].lstrip()
    packed = next((name for begin, name in _PACKED.items() if content.startswith(begin)), None)
    if not content.strip():
        return "is empty; expected the whole file"
    if not content.strip(b"\0"):
        return f"holds {len(content)} zero bytes, as after a full disk; expected the whole file"
    if content.startswith(_POINTER):
        return _PULL
    if beginning.lower().startswith(_PAGES):
        title = _TITLE.search(content)
        named = f" ({title[1].decode(errors='replace').strip()})" if title else ""
        return f"is a web page{named}, as a failed download leaves; expected the file itself"
    if packed is not None:
        return f"is packed ({packed}); expected it unpacked"
    if content.startswith(_UTF_16) or _ZERO_BYTES_BETWEEN.match(content):
        return "not UTF-8, but UTF-16; expected UTF-8 without a byte order mark"
    return None


def is_pointer(content: bytes) -> bool:
    """Return whether `content` is the beginning of a Git LFS pointer."""
    return content.startswith(_POINTER)


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
