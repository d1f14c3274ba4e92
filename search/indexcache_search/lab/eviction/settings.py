"""What a training of eviction heads is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from indexcache_search.distill.settings import TrainingSettings, rate
from indexcache_search.errors import SearchError
from indexcache_search.lab.eviction.heads import BiasUse
from sglang_indexcache.pattern import SHARED


@dataclass(frozen=True, kw_only=True)
class EvictionSettings(TrainingSettings):
    """What the heads depend on; the pattern is of D and F, with a selection whose steps are `nosa` with heads.

    Attributes:
        use: where the heads' bias is added, see `EvictionHeads`.
        body: whether the model trains, too: by the language modelling loss. Else the heads learn alone, from the
            divergence to the model that attends to everything.
        steps: how many.
        heads_lr: peak learning rate of the heads.
    """

    use: BiasUse
    body: bool
    steps: int
    heads_lr: float

    def check(self, processes: int) -> None:
        """See `TrainingSettings.check`.

        Raises:
            SearchError: if there is nothing to train, or it can't be trained so.
        """
        if processes > 1:
            raise SearchError(f"eviction heads are trained in one process, found {processes}")
        if SHARED in self.pattern.roles or "F" not in self.pattern.roles:
            raise SearchError(
                f"--pattern is {self.pattern.roles}, expected D and F: eviction heads serve layers that choose for"
                " themselves"
            )
        if self.steps < 1:
            raise SearchError("--steps is 0, expected at least one step")
        super().check(processes)

    def rate(self, step: int) -> float:
        """What the peak learning rates are multiplied with at a step, counted from 0."""
        return rate(self.schedule, self.ramp_steps, step, self.steps)
