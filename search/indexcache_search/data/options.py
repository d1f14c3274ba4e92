"""User options for reading rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Turns = Literal["auto", "all", "each", "last"]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options for interpreting rows.

    Attributes:
        chat_template: Jinja text that replaces the tokenizer's own template.
        turns: see `ChatTemplate`.
        skip_bad_rows: how many bad rows of each source may be skipped.
    """

    chat_template: str | None = None
    turns: Turns = "auto"
    skip_bad_rows: int = 0


AS_THEY_ARE = RowOptions()
"""Defaults: the tokenizer's own template, and no skipped rows."""
