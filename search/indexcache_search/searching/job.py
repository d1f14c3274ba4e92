"""A search, before anything is read: what to search, on which data, how, and where its files go."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from indexcache_search.console import messages
from indexcache_search.data.templates import AS_THEY_ARE, RowOptions
from indexcache_search.engines.settings import RunSettings
from indexcache_search.searching.settings import Settings


@dataclass(frozen=True, kw_only=True)
class SearchData:
    """Sources and sizes of the calibration and the held-out set; `seq_len` None means 4 x `first_sparse_position`.

    `seed` decides the order of the calibration data. `reply`, see `TokenSet.ending_in_replies`; `None` if all tokens
    count that sources let count. `rows` says how rows are understood.
    """

    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]
    seq_len: int | None
    num_sequences: int
    num_eval_sequences: int
    seed: int = 0
    reply: int | None = None
    rows: RowOptions = AS_THEY_ARE


@dataclass(frozen=True, kw_only=True)
class Files:
    """Folder of results and journal; `restart` discards the journal first."""

    folder: Path
    work_dir: Path
    restart: bool


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """A whole search, which `run.run` runs and `forecasts.estimate` estimates.

    Attributes:
        model: folder or hub id.
        console: for messages and progress; by default nothing is printed.
        command: the command line, for README.md.
    """

    model: str
    data: SearchData
    files: Files
    run: RunSettings = field(default_factory=RunSettings)
    settings: Settings
    console: Console = field(default_factory=partial(messages, quiet=True))
    command: str | None = None
