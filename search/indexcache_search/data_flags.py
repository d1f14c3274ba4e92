"""How sources are read, as flags of command lines say it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from indexcache_search import bounded
from indexcache_search.data.options import RowOptions, Turns
from indexcache_search.data.templates import read_template

ChatTemplate = Annotated[
    Path | None,
    typer.Option(help="File with the Jinja template of conversations. Default: the tokenizer's.", metavar="FILE"),
]
TurnsFlag = Annotated[
    Turns,
    typer.Option(
        "--turns",
        help="Of a conversation with several replies: all in one text, each with what came before it, or the last."
        " auto: all; each where the chat template writes earlier turns otherwise once others follow.",
    ),
]
SkipBadRows = Annotated[
    int,
    typer.Option(
        help="Rows of a source that may be skipped because they can't be understood.",
        callback=bounded.within(0, 1_000_000_000),
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what is read of the data, with examples, and end before anything loads.")
]


def row_options(chat_template: Path | None, turns: Turns, skip_bad_rows: int) -> RowOptions:
    """What the flags say.

    Raises:
        IndexCacheError: if the template can't be read.
    """
    text = None if chat_template is None else read_template(chat_template)
    return RowOptions(chat_template=text, turns=turns, skip_bad_rows=skip_bad_rows)
