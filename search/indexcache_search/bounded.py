"""Numbers on command lines, each within bounds that have a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import typer

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Bounds:
    """Numbers that an option takes, both ends included; NaN and infinity are never among them.

    Attributes:
        least: the smallest.
        most: the largest.
        reason: why there is nothing beyond, for whoever asked for more.
    """

    least: float
    most: float
    reason: str = ""

    def check(self, value: Number | None) -> Number | None:
        """Refuse a number beyond the bounds; an option's callback."""
        return value if value is None else self.checked(value)

    def checked(self, value: Number, key: str = "") -> Number:
        """Refuse a number beyond the bounds, of the setting `key` of an option.

        Raises:
            typer.BadParameter: with what was found and what is expected.
        """
        if self.least <= value <= self.most:
            return value
        why = f": {self.reason}" if self.reason and value > self.most else ""
        where = f"{key}: " if key else ""
        raise typer.BadParameter(
            f"{where}found {_shown(value)}, expected {_shown(self.least)} to {_shown(self.most)}{why}"
        )


SEQUENCES = Bounds(1, 1_000_000, "standard errors fall with the root of the number")
TOKENS = Bounds(1, 1 << 24, "no model was made for more")
BATCH = Bounds(1, 65_536, "more at once takes memory and no less time")
STEPS = Bounds(1, 100_000_000, "no training runs for more")
STEPS_OR_NONE = Bounds(0, STEPS.most, STEPS.reason)
RATE = Bounds(0, 1e3)
SEED = Bounds(0, (1 << 63) - 1)  # what NumPy and PyTorch both take


def within(least: float, most: float, reason: str = "") -> Callable[[Number | None], Number | None]:
    """Make an option's callback that refuses anything beyond."""
    return Bounds(least, most, reason).check


def sequences(least: int = 1) -> Callable[[int | None], int | None]:
    """For numbers of sequences or samples."""
    return Bounds(least, SEQUENCES.most, SEQUENCES.reason).check


def tokens(least: int = 1) -> Callable[[int | None], int | None]:
    """For lengths in tokens."""
    return Bounds(least, TOKENS.most, TOKENS.reason).check


def batch() -> Callable[[int | None], int | None]:
    """For sequences that a device takes at once."""
    return BATCH.check


def steps(least: int = 1) -> Callable[[int | None], int | None]:
    """For steps of a training."""
    return Bounds(least, STEPS.most, STEPS.reason).check


def rate() -> Callable[[float | None], float | None]:
    """For learning rates."""
    return RATE.check


def seed() -> Callable[[int | None], int | None]:
    """For seeds."""
    return SEED.check


def _shown(value: float) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:12]}... ({len(text)} digits)"
