"""Numbers on command lines, each within bounds that have a reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self, TypeVar

import typer

from indexcache_search.errors import SearchError

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Bounds:
    """Bounds of an option's numbers, both ends included; NaN and infinity are outside.

    Attributes:
        least: the smallest number.
        most: the largest number.
        reason: why larger numbers are refused; shown to the user.
    """

    least: float
    most: float
    reason: str = ""

    def check(self, value: Number | None) -> Number | None:
        """Refuse a number outside the bounds; the option's callback.

        Raises:
            typer.BadParameter: naming the number found and the bounds.
        """
        if value is None or self.least <= value <= self.most:
            return value
        why = f": {self.reason}" if self.reason and value > self.most else ""
        raise typer.BadParameter(f"found {_shown(value)}, expected {_shown(self.least)} to {_shown(self.most)}{why}")


@dataclass(frozen=True)
class ShareAt:
    """A share of something, and the tokens for which it is meant; classes derived from it have a default for these."""

    share: float
    context: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `0.4@65536` or `0.4`.

        Raises:
            SearchError: if it is neither, or out of range.
        """
        match = re.fullmatch(r"(0?\.[0-9]{1,6}|1)(?:@([1-9][0-9]{0,8}))?", text.strip())
        if match is None or not 0 < float(match[1]) <= 1:
            raise SearchError(f"found {text[:40]!r}, expected a share and tokens, such as 0.4@65536")
        return cls(float(match[1]), *map(int, filter(None, match.groups()[1:])))


SEQUENCES = Bounds(1, 1_000_000, "standard errors fall with the root of the number")
TOKENS = Bounds(1, 1 << 24, "no model was made for more")
TWO_TOKENS = Bounds(2, TOKENS.most, TOKENS.reason)
BATCH = Bounds(1, 65_536, "more at once takes memory and no less time")
SEED = Bounds(0, (1 << 63) - 1)  # accepted by NumPy and by PyTorch


def _shown(value: float) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:12]}... ({len(text)} digits)"
