"""Intervals and folders of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Intervals:
    """Steps between evaluations, checkpoints and printed lines; the last step of a task has all three."""

    evaluate: int
    checkpoint: int
    show: int


@dataclass(frozen=True)
class Folders:
    """Output folders of a run.

    Attributes:
        output: the folder of `--output`.
        restart: discard the results of an earlier run.
        command: name of the command, which marks its folders.
    """

    output: Path
    restart: bool
    command: str = "indexcache-distill"

    @property
    def work(self) -> Path:
        """Folder of the run's state."""
        return self.output / "work"

    @property
    def converted(self) -> Path:
        """Folder of the DSA checkpoint that a dense model becomes, before any training."""
        return self.work / "converted"

    @property
    def warmed_up(self) -> Path:
        """Folder of the model after the warm-up."""
        return self.work / "warmed-up"

    @property
    def events(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.output / "tensorboard"

    @property
    def model(self) -> Path:
        """Folder of the trained model."""
        return self.output / "model"
