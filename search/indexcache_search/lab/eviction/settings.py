"""Settings of a training of eviction heads."""

from __future__ import annotations

from dataclasses import dataclass

from indexcache_search.distill.settings import TrainingSettings, rate
from indexcache_search.errors import SearchError
from indexcache_search.lab.eviction.heads import BiasUse
from sglang_indexcache.pattern import SHARED


@dataclass(frozen=True, kw_only=True)
class EvictionSettings(TrainingSettings):
    """Inputs of the heads; the pattern is of D and F, with a selection whose steps are `nosa` with heads.

    Attributes:
        use: when the heads' bias is added, see `EvictionHeads`.
        body: train the model, too, by the language modelling loss. Otherwise only the heads learn, from the divergence
            to the model with attention to everything.
        steps: number of steps.
        heads_lr: peak learning rate of the heads.
    """

    use: BiasUse
    body: bool
    steps: int
    heads_lr: float

    def check(self, processes: int) -> None:
        """Check the settings; see `TrainingSettings.check`.

        Raises:
            SearchError: if there is nothing to train, or training is not possible in this way.
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
        """Return the factor of the peak learning rates at a step, counted from 0."""
        return rate(self.schedule, self.ramp_steps, step, self.steps)
