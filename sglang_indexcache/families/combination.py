"""A feature of SGLang, and whether a pattern ran with it; families and extensions list them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RAN, REFUSED, NOT_RUN, UNJUDGED = "ran", "refused", "not run", "could not be judged"


@dataclass(frozen=True)
class Combination:
    """A feature of SGLang.

    Attributes:
        name: as SGLang's documentation calls it.
        flags: the flags that ask for it.
        ran: where it ran; empty if nowhere.
        reads: the names in `Meaning` of what its flags set.
        condition: whether server arguments ask for it; by itself, if one of `reads` is on, or more than 1.
        without: what was not run, of one that ran in part.
        family: name of the family on whose models it ran.
        default: where it is on although nothing asks for it, in words; by a launch line of one SGLang, and the family.
    """

    name: str
    flags: tuple[str, ...]
    ran: str
    reads: tuple[str, ...]
    condition: Callable[[Any], bool] | None = None
    without: str = ""
    family: str = "dsa"
    default: Callable[[Any, Any], str] = lambda line, family: ""

    def asked(self, arguments: Any) -> bool:
        """Return whether server arguments ask for it."""
        if self.condition is not None:
            return self.condition(arguments)
        values = [getattr(arguments, name, None) for name in self.reads]
        return any(value > 1 if type(value) is int else value for value in values)

    @property
    def verdict(self) -> Verdict:
        """Return whether a pattern ran with it, and where."""
        if not self.ran:
            return Verdict(NOT_RUN, self.name, self.without)
        return Verdict(RAN, self.name, self.ran + (f"; not run: {self.without}" if self.without else ""))


@dataclass(frozen=True)
class Verdict:
    """The answer for one feature that a launch line asks for.

    Attributes:
        state: `RAN`, `REFUSED`, `NOT_RUN` or `UNJUDGED`.
        name: the feature; of a refused one the flag.
        why: where it ran, why it is refused, or what is known all the same.
    """

    state: str
    name: str
    why: str

    @property
    def line(self) -> str:
        """One line for people."""
        return f"{self.state}: {self.name}" + (f" ({self.why})" if self.why else "")
