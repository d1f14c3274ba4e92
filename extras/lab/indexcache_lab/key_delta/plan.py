"""Plans for the keys of a dense model: rounded to earlier ones, in few bits, or only some of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from indexcache_search.errors import SearchError

KeyMethod = Literal["key_delta", "key_bits", "sink_window", "key_blocks"]
METHODS: tuple[KeyMethod, ...] = get_args(KeyMethod)
Stage = Literal["reading", "decoding"]
"""A prompt is read at once; a reply is decoded token by token."""
STAGES: tuple[Stage, ...] = get_args(Stage)
SINKS = 4  # number of first keys that `sink_window` always sees
BLOCK = 16  # keys of a block
LONG = 512  # default tokens of a sequence
BITS_GROUP = 32  # tokens that share the range of their bits


@dataclass(frozen=True, kw_only=True)
class KeyPlan:
    """One value for each layer, and the keys near a query that stay exact.

    | method | a value | keys that a query sees |
    |---|---|---|
    | `key_delta` | a threshold, 0 for none | keys as differences to the key before (DeltaLLM, arXiv 2507.19608) |
    | `key_bits` | 2 to 16 bits | keys rounded, each number in a range of its own for 32 tokens |
    | `sink_window` | a number of keys | that many before the query, and the first 4 |
    | `key_blocks` | a share, up to 1 | that share of the blocks of 16 keys, the best by their mean key |

    Attributes:
        method: one of these.
        values: one for each layer.
        window: of `key_delta` and `key_bits`: while a prompt is read, keys in the query's own square along the diagonal
            are exact; the square's size as a share of the prompt. Bits round whole groups of tokens before it.
        max_window: largest size of the square in tokens; `None` for no limit.
        recent: of the same methods: last keys that are exact while a reply is written, the query's own included.

    Raises:
        SearchError: if a value does not fit the method.
    """

    method: KeyMethod
    values: tuple[float, ...]
    window: float = 0.05
    max_window: int | None = None
    recent: int = 4

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SearchError(f"method is {self.method!r}, expected one of {', '.join(METHODS)}")
        least, most = {"key_bits": (2, 16), "key_blocks": (0.001, 1)}.get(self.method, (0, math.inf))
        wrong = [value for value in self.values if not least <= value <= most or not math.isfinite(value)]
        if not self.values or wrong:
            found = wrong[0] if wrong else "missing"
            raise SearchError(f"{self.method}: a value is {found}, expected {least} to {most}")
        if self.method in ("key_bits", "sink_window") and any(value != int(value) for value in self.values):
            raise SearchError(f"{self.method}: values are whole numbers")
        if not 0 < self.window < 1:
            raise SearchError(f"window is {self.window}, expected a share between 0 and 1")
        if self.recent < 1 or (self.max_window is not None and self.max_window < 1):
            raise SearchError(f"recent is {self.recent} and max_window {self.max_window}, expected at least 1")

    @property
    def key(self) -> str:
        """The whole plan in one word; see `from_key`."""
        near = f"{self.window!r},{self.max_window or ''},{self.recent}"
        return "|".join((self.method, near, ",".join(repr(float(value)) for value in self.values)))

    @property
    def order(self) -> tuple[str, str]:
        """See `Plan.order`."""
        return "", self.key

    @property
    def pattern(self) -> None:
        """See `Plan.pattern`: it has no letters."""

    @classmethod
    def from_key(cls, key: str) -> Self:
        """Read a plan from its `key`.

        Raises:
            SearchError: if it is not a key.
        """
        try:
            method, near, values = key.split("|")
            window, most, recent = near.split(",")
            plan = cls(
                method=method,  # type: ignore[arg-type]  # checked
                values=tuple(map(float, values.split(","))),
                window=float(window),
                max_window=int(most) if most else None,
                recent=int(recent),
            )
        except ValueError:
            raise SearchError(f"{key[:60]!r} is no plan for keys") from None
        if plan.key != key:
            raise SearchError(f"{key[:60]!r} is no plan for keys")
        return plan

    def __str__(self) -> str:
        return self.key

    @property
    def name(self) -> str:
        """Short name for messages."""
        low, high = min(self.values), max(self.values)
        value = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        return {
            "key_delta": f"differences above {value}",
            "key_bits": f"keys of {value} bits",
            "sink_window": f"{SINKS} sinks and a window of {value}",
            "key_blocks": f"{value} of the blocks of {BLOCK}",
        }[self.method]

    def with_value(self, layer: int, value: float) -> Self:
        """Return this plan with another value for one layer."""
        return replace(self, values=(*self.values[:layer], value, *self.values[layer + 1 :]))

    def square(self, prompt: int) -> int:
        """Return the size of the squares along the diagonal for a prompt of `prompt` tokens (equation 5)."""
        size = int(self.window * prompt)
        return max(1, size if self.max_window is None else min(size, self.max_window))
