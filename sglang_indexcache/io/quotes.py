"""Quotes that a shell or a file of variables left around a value."""

from __future__ import annotations

_QUOTES = dict.fromkeys(map(ord, "\"'`\u2018\u2019\u201c\u201d"))


def unquoted(text: str) -> str:
    """Return `text` without quotes, and without white space around it."""
    return text.strip().translate(_QUOTES).strip()
