"""Words that tables, pages and terminals share."""

from __future__ import annotations

from sglang_indexcache.pattern.selection import PatternSelection


def counted(number: int, noun: str) -> str:
    """Write a number of things; `noun` is of one, and gets an `s` for more."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def serving_flags(selection: PatternSelection | None) -> tuple[str, ...]:
    """Return the flags that SGLang needs beside a pattern with this selection; `None` where indexers select."""
    return () if selection is None else selection.serving_flags()
