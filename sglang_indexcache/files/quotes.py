"""Quotes that a shell or a file of variables left around a value."""

from __future__ import annotations

_QUOTES = dict.fromkeys(map(ord, "\"'`\u2018\u2019\u201c\u201d"))


def unquoted(text: str) -> str:
    """`text` without quotes, and without white space around it; the same where there is none of either."""
    return text.strip().translate(_QUOTES).strip()
