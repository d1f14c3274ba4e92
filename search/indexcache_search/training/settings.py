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
    """Where a run writes.

    Attributes:
        output: the folder that was named.
        restart: discard what an earlier run left there.
        command: that runs, by which its folders are known.
    """

    output: Path
    restart: bool
    command: str = "indexcache-distill"

    @property
    def work(self) -> Path:
        return self.output / "work"

    @property
    def warmed_up(self) -> Path:
        return self.work / "warmed-up"

    @property
    def events(self) -> Path:
        return self.output / "tensorboard"

    @property
    def model(self) -> Path:
        return self.output / "model"
