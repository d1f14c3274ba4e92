"""How often a run stops to look, and where it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Intervals:
    """Steps between evaluations, checkpoints and lines for people; the last step of a task has all three."""

    evaluate: int
    checkpoint: int
    show: int


@dataclass(frozen=True)
class Folders:
    """Where a run writes; `restart` discards what an earlier one left there."""

    output: Path
    restart: bool

    @property
    def work(self) -> Path:
        return self.output / "work"

    @property
    def model(self) -> Path:
        return self.output / "model"
