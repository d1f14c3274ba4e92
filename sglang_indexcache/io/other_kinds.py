"""Name what a file holds instead of the text that belongs there: what downloads, git, editors and full disks leave."""

from __future__ import annotations

import codecs
import re

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024
_TITLE = re.compile(rb"<title[^>]*>([^<]{0,200})", re.IGNORECASE)
_PAGES = (b"<!doctype html", b"<html", b"<?xml", b"<error")
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ZERO_BYTES_BETWEEN = re.compile(rb"[^\0]\0[^\0]\0|\0[^\0]\0[^\0]")
_PULL = "a Git LFS pointer, not the file itself; expected `git lfs pull` in that folder, or a download by `hf download`"


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
