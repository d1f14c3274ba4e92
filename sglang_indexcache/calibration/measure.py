"""Measures of a calibration server beside logprobs; entry points of the group `indexcache.measures` add to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from sglang_indexcache.calibration.preflight import Calibration
from sglang_indexcache.sglang.probes import Feature

UNMEASURED = "with pipeline stages, nor by an SGLang without the places for it (indexcache-check --environment)"
Action = Callable[[Calibration, Any, Mapping[str, Any]], dict[str, Any]]
"""Takes the server's plan, SGLang's `ModelRunner` of this rank and the request's body; returns what it answers."""


class Measure:
    """A measurement on the forward passes of requests whose id names it.

    Attributes:
        name: in ids of requests, and among the `measures` of a status.
        feature: what SGLang must have for it.
        refusal: the line that its actions answer where it can't be measured.
    """

    name: ClassVar[str]
    feature: ClassVar[Feature]
    refusal: ClassVar[str]

    def actions(self) -> dict[str, Action]:
        """Return the control requests that it answers, by name; they raise an `IndexCacheError` to refuse."""
        raise NotImplementedError

    def fits(self, calibration: Calibration) -> bool:
        """Return whether it can be measured of this server's model, by an SGLang with its `feature`."""
        return True

    def before_forward(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Look at a pass before `ModelRunner.forward`; called where SGLang has `probes.SAMPLING`."""

    def switched(self, is_baseline: bool) -> None:
        """Note that another pattern runs now, or the baseline's."""
