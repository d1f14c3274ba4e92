"""A comparison, before anything is read: what is compared, on which data, how, and where its files go."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from indexcache_search.console import messages
from indexcache_search.engines.settings import RunSettings
from indexcache_search.eval.candidates import Candidates
from indexcache_search.eval.held_out import ComparisonData
from indexcache_search.eval.speeds import SpeedOptions


@dataclass(frozen=True, kw_only=True)
class ComparisonJob:
    """A whole comparison, which `run.run` runs.

    Attributes:
        model: folder or hub id; with servers only its tokenizer and config.json are read.
        candidates: patterns or servers to compare.
        data: the held-out data.
        output: folder of the results and the journal.
        run: how patterns are evaluated.
        restart: discard the journal first.
        speed: what to compare beside losses.
        console: for messages and progress; by default nothing is printed.
    """

    model: str
    candidates: Candidates
    data: ComparisonData
    output: Path
    run: RunSettings = field(default_factory=RunSettings)
    restart: bool = False
    speed: SpeedOptions | None = None
    console: Console = field(default_factory=partial(messages, quiet=True))
