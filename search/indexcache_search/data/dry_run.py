"""Print the data that was read, before any model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from indexcache_search.data.reader import Reading, TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import SearchError
from sglang_indexcache.errors import one_line


def show(reader: TokenReader, sets: Mapping[str, TokenSet]) -> None:
    """Print how much each source gave to each set, and the first row of each source.

    Args:
        reader: the reader that read the sets.
        sets: token sets by the purpose for which their sources were read.
    """
    out = Console(highlight=False, markup=False, soft_wrap=True)
    for note in reader.notes:
        out.print(f"note: {note}")
    shown: set[str] = set()
    for purpose, tokens in sets.items():
        out.print(
            f"{purpose}: {tokens.num_sequences} sequences of {tokens.seq_len} tokens, {tokens.scored_tokens} tokens are"
            f" scored; sha256 {tokens.sha256[:16]}"
        )
        for number, source in enumerate(tokens.sources):
            reading = next((item for item in reader.readings if (item.purpose, item.source) == (purpose, source)), None)
            rows = tokens.source_of == number
            given = f"{int(rows.sum())} sequences, {int(tokens.scored[rows].sum())} tokens scored"
            out.print(f"  {source}: {given}" + ("" if reading is None else f"; {reading}"))
            if reading is not None and source not in shown:
                shown.add(source)
                _show_rows(out, reading, reader)
    out.print("Nothing was loaded and nothing written; without --dry-run the same data are used.")


def _show_rows(out: Console, reading: Reading, reader: TokenReader) -> None:
    read = ", ".join(f"{count} of {name}" for name, count in reading.rows.items())
    unread = f"; columns not read: {', '.join(sorted(reading.unread))}" if reading.unread else ""
    out.print("    " + one_line(f"rows: {read}{unread}"))
    text = reading.example
    if reading.example_ids:
        try:
            text = reader.tokenizer.decode(list(reading.example_ids))
        except SearchError:  # ids need no tokenizer
            text = f"token ids {list(reading.example_ids)}"
    counts = " ([[what counts]])" if reader.replies and "[[" in text else ""
    out.print(f"    the first{counts}: {one_line(_escaped(text), 800)}")


def _escaped(text: str) -> str:
    """Return `text` with visible line ends and tabs."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
