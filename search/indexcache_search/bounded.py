"""Numbers on command lines, each within bounds that have a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

Number = TypeVar("Number", int, float)

SEQUENCES = 1_000_000
TOKENS = 1 << 24
SEED = (1 << 63) - 1


def within(
    least: float, most: float, reason: str = "", *, open_below: bool = False
) -> Callable[[Number | None], Number | None]:
    """Make an option's callback that refuses anything but a number from `least` to `most`, NaN and infinity too.

    Args:
        least: the smallest that is taken.
        most: the largest.
        reason: why there is nothing beyond, for whoever asked for more.
        open_below: whether `least` itself is refused.
    """

    def check(value: Number | None) -> Number | None:
        if value is None or (least <= value <= most and not (open_below and value == least)):
            return value
        why = f": {reason}" if reason and value > most else ""
        lower = f"more than {_shown(least)}, at most" if open_below else f"{_shown(least)} to"
        raise typer.BadParameter(f"found {_shown(value)}, expected {lower} {_shown(most)}{why}")

    return check


def sequences(least: int = 1) -> Callable[[int | None], int | None]:
    """For numbers of sequences or samples."""
    return within(least, SEQUENCES, "standard errors fall with the root of the number")


def tokens(least: int = 1) -> Callable[[int | None], int | None]:
    """For lengths in tokens."""
    return within(least, TOKENS, "no model was made for more")


def batch() -> Callable[[int | None], int | None]:
    """For sequences that a device takes at once."""
    return within(1, 65_536, "more at once takes memory and no less time")


def steps(least: int = 1) -> Callable[[int | None], int | None]:
    """For steps of a training."""
    return within(least, 100_000_000, "no training runs for more")


def rate() -> Callable[[float | None], float | None]:
    """For learning rates."""
    return within(0, 1e3)


def seed() -> Callable[[int | None], int | None]:
    """For seeds: what NumPy and PyTorch both take."""
    return within(0, SEED)


def _shown(value: float) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:12]}... ({len(text)} digits)"
