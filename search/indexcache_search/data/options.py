"""What a person may say about rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Turns = Literal["auto", "all", "each", "last"]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How rows are understood.

    Attributes:
        chat_template: Jinja, in the place of the tokenizer's own.
        turns: see `ChatTemplate`.
        skip_bad_rows: of a source, how many may be skipped.
    """

    chat_template: str | None = None
    turns: Turns = "auto"
    skip_bad_rows: int = 0


AS_THEY_ARE = RowOptions()
"""The tokenizer's own template, and no row may be skipped."""
