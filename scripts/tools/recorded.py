"""Evaluations of a journal's file, as they stand there."""

from __future__ import annotations

from pathlib import Path

from indexcache_search.evaluation.journal import records_of
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.evaluation.records import Sealer, complete
from sglang_indexcache import Pattern


def recorded(path: Path) -> list[tuple[str, Evaluation]]:
    """Return every evaluation in a journal's file with the name of its set, for any search.

    Raises:
        JournalError: if the file is damaged.
    """
    records = records_of(complete(path.read_bytes()), path, Sealer(), Pattern.from_key)
    return [(record[0][0], record[1]) for record in records if isinstance(record, tuple)]
