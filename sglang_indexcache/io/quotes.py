"""Quotes that a shell or a file of variables left around a value, and a byte order mark that an editor left."""

from __future__ import annotations

_LEFT = dict.fromkeys(map(ord, "\"'`\u2018\u2019\u201c\u201d\ufeff"))


def unquoted(text: str) -> str:
    """Return `text` without quotes and byte order marks, and without white space around it."""
    return text.strip().translate(_LEFT).strip()
