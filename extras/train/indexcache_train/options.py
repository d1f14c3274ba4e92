"""Options of commands that train, and bounds of their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from indexcache_search.cli.bounded import SEQUENCES, Bounds
from indexcache_search.cli.command import number, settings
from indexcache_search.cli.options import ROW_KEYS, RowsChoice, sources
from indexcache_search.data import JUDGED

TRAINING_SEQUENCES = Bounds(1, 100_000_000)
WIDTH = Bounds(1, 65_536)
STEPS = Bounds(1, 100_000_000, "no training runs for more")
STEPS_OR_NONE = Bounds(0, STEPS.most, STEPS.reason)
RATE = Bounds(0, 1e3)
MILLION = Bounds(0, 1e6)


@dataclass(frozen=True, kw_only=True)
class DocumentsChoice(RowsChoice):
    """Settings for reading and packing the rows of sources; see `Packer`."""

    documents: Literal["joined", "apart"] = "joined"


Training = Annotated[list[str] | None, sources("Training text")]
RowsOfDocuments = Annotated[
    DocumentsChoice | None,
    settings(
        DocumentsChoice,
        f"{ROW_KEYS}, documents (joined: a token sees all before it in its sequence; apart: its own document alone).",
    ),
]
NumEvalSequences = Annotated[int | None, number(f"Held-out sequences. Default: {JUDGED}.", SEQUENCES)]
