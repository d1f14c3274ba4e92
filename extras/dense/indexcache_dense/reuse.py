"""Policies by which a decode step reuses the selections of the steps before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import ConfigDict, Field

from sglang_indexcache.io.errors import PatternError

StepPolicy = Literal["none", "ema", "bounded", "refresh", "nosa"]
POLICIES: tuple[StepPolicy, ...] = get_args(StepPolicy)
Importance = Literal["heads"]
_NUMBERS = {"ema": "beta", "bounded": "swaps", "refresh": "every", "nosa": "query_pages"}
_MOST = 65536
GRAMMAR = "none, ema:BETA, bounded:SWAPS, refresh:EVERY, nosa:QUERY_PAGES or nosa:QUERY_PAGES:heads"


@dataclass(frozen=True, kw_only=True)
class ReusePolicy:
    """The policy by which a selection depends on the decode steps before it, since the last prompt.

    The first step that selects uses its own scores under all policies.

    | policy | its number | what is selected in a step |
    |---|---|---|
    | `none` | | the best by the step's own scores |
    | `ema` | `beta` | the best by scores averaged over steps: beta x the average + (1 - beta) x the step's own |
    | `bounded` | `swaps` | what was selected before, of which at most so many are traded for better ones |
    | `refresh` | `every` | what was selected before, until after so many steps all are selected anew |
    | `nosa` | `query_pages` | so many by the step's own scores, the rest by an importance that no query changes |

    The last is the split of NOSA (arXiv 2510.13602, equation 7): of k selected pages at least k - `query_pages` are
    those of the step before (its Theorem 2). `importance` is the norm of values, or the output of trained heads.

    Raises:
        PatternError: if a policy is not one of these, or has another number than its own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    policy: Annotated[StepPolicy, Field(description="what a choice remembers of the decode steps before it")] = "none"
    beta: Annotated[float | None, Field(strict=True, description="of ema, between 0 and 1")] = None
    swaps: Annotated[int | None, Field(strict=True, ge=1, le=_MOST, description="of bounded, pages a step")] = None
    every: Annotated[int | None, Field(strict=True, ge=2, le=_MOST, description="of refresh, steps")] = None
    query_pages: Annotated[int | None, Field(strict=True, ge=1, le=_MOST, description="of nosa, pages a step")] = None
    importance: Annotated[Importance | None, Field(description="of nosa: trained heads instead of norms of values")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise PatternError(f"steps: policy is {self.policy!r}, expected one of {', '.join(POLICIES)}")
        own = _NUMBERS.get(self.policy)
        for name in _NUMBERS.values():
            value = getattr(self, name)
            if (value is None) == (name == own):
                expected = "a number" if name == own else "none"
                raise PatternError(f"steps: {name} of policy {self.policy} is {value!r}, expected {expected}")
        if self.importance is not None and (self.importance != "heads" or self.policy != "nosa"):
            raise PatternError(
                f"steps: importance of {self.policy} is {self.importance!r}, expected heads, of nosa, or none"
            )
        if self.policy == "ema":
            if type(self.beta) is not float or not 0 < self.beta < 1 or not math.isfinite(self.beta):
                raise PatternError(f"steps: beta is {self.beta!r}, expected a decimal between 0 and 1")
        elif own is not None:
            value, least = getattr(self, own), 2 if own == "every" else 1
            if type(value) is not int or not least <= value <= _MOST:
                raise PatternError(f"steps: {own} is {value!r}, expected {least} to {_MOST}")

    def __str__(self) -> str:
        """Return the policy in one word, as on a command line: `ema:0.9`."""
        if self.policy == "none":
            return self.policy
        heads = "" if self.importance is None else f":{self.importance}"
        return f"{self.policy}:{getattr(self, _NUMBERS[self.policy])!r}{heads}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text that `str` gives.

        Raises:
            PatternError: if `text` has another form.
        """
        policy, _, rest = text.partition(":")
        number, _, importance = rest.partition(":")
        wrong = PatternError(f"steps are {text[:40]!r}, expected {GRAMMAR}")
        if policy not in POLICIES:
            raise wrong
        try:
            name = _NUMBERS.get(policy)
            numbers = {} if name is None else {name: float(number) if name == "beta" else int(number)}
        except ValueError:
            raise wrong from None
        steps = cls(policy=policy, importance=importance or None, **numbers)  # type: ignore[arg-type]
        if str(steps) != text:
            raise wrong
        return steps


NO_MEMORY = ReusePolicy()
