"""Print the data that was read, before any model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich.console import Console

from indexcache_search.data.reader import SourceReading, TokenReader
from indexcache_search.data.shapes import Text
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import SearchError
from sglang_indexcache.io.errors import one_line

_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})
_ENDS = 160  # characters of either end of an example


def show(reader: TokenReader, sets: Mapping[str, TokenSet]) -> None:
    """Print how much each source gave to each set, by its purpose, and the first row of each source."""
    out = Console(highlight=False, markup=False, soft_wrap=True)
    for note in reader.notes:
        out.print(f"note: {note}")
    shown: set[str] = set()
    for purpose, tokens in sets.items():
        used = sum(reading.used for reading in reader.readings if reading.purpose == purpose)
        apart = "" if tokens.starts is None else f", {_documents(tokens)} documents apart"
        out.print(
            f"{purpose}: {tokens.num_sequences} sequences of {tokens.seq_len} tokens, from {_number(used)}{apart},"
            f" {tokens.scored_tokens} tokens are scored; sha256 {tokens.sha256[:16]}"
        )
        for number, source in enumerate(tokens.sources):
            reading = next((item for item in reader.readings if (item.purpose, item.source) == (purpose, source)), None)
            rows = tokens.source_of == number
            documents = "" if reading is None else f"from {_number(reading.used)}, "
            given = f"{int(rows.sum())} sequences, {documents}{int(tokens.scored[rows].sum())} tokens scored"
            out.print(f"  {source}: {given}" + ("" if reading is None else f"; {reading}"))
            if reading is not None and source not in shown:
                shown.add(source)
                _show_rows(out, reading, reader)
    out.print("Nothing was loaded and nothing written; without --dry-run the same data are used.")


def _number(documents: int) -> str:
    return f"{documents} document" + "s" * (documents != 1)


def _documents(tokens: TokenSet) -> int:
    """Count the documents, and parts of such, of which each token sees its own alone."""
    assert tokens.starts is not None
    return int((tokens.starts == np.arange(tokens.seq_len)).sum())


def _show_rows(out: Console, reading: SourceReading, reader: TokenReader) -> None:
    read = ", ".join(f"{count} of {name}" for name, count in reading.rows.items())
    unread = f"; columns not read: {', '.join(sorted(reading.unread))}" if reading.unread else ""
    out.print("    " + one_line(f"rows: {read}{unread}"))
    if isinstance(reading.example, Text):
        text = _example(reading.example, reader.replies)
    else:
        ids = (reading.example or [])[:_ENDS]
        try:
            text = reader.tokenizer.decode(ids)
        except SearchError:  # ids need no tokenizer
            text = f"token ids {ids}"
    counts = " ([[what counts]])" if reader.replies and "[[" in text else ""
    out.print(f"    the first{counts}: {one_line(text.translate(_ESCAPED), 800)}")


def _example(text: Text, replies: bool) -> str:
    """Shorten a text to both ends; with `replies`, mark a model's words with `[[` and `]]`."""
    shown = text.text
    for start, stop in reversed(text.replies if replies else ()):
        shown = f"{shown[:start]}[[{shown[start:stop]}]]{shown[stop:]}"
    return shown if len(shown) <= 2 * _ENDS else f"{shown[:_ENDS]} ... {shown[-_ENDS:]}"
