"""What a training of eviction heads is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from indexcache_search.distill.settings import Schedule, rate
from indexcache_search.errors import SearchError
from indexcache_search.lab.eviction.heads import BiasUse
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import SHARED


@dataclass(frozen=True, kw_only=True)
class EvictionSettings:
    """What the trained weights depend on, beside model and data.

    Attributes:
        pattern: of D and F, with a selection whose steps are `nosa` with heads.
        use: where the heads' bias is added, see `EvictionHeads`.
        body: whether the model trains, too: by the language modelling loss. Else the heads learn alone, from the
            divergence to the model that attends to everything.
        steps: how many.
        heads_lr: peak learning rate of the heads.
        lr: peak learning rate of the body.
        schedule: see `distill.settings.Settings`; so are the others.
    """

    pattern: Pattern
    use: BiasUse
    body: bool
    steps: int
    heads_lr: float
    lr: float
    schedule: Schedule
    ramp_steps: int
    batch_size: int
    micro_batch_size: int
    weight_decay: float
    max_norm: float
    seed: int

    def check(self, processes: int) -> None:
        """Check what can be checked without a model.

        Raises:
            SearchError: if there is nothing to train, or it can't be trained so.
        """
        selection = self.pattern.selection
        assert selection is not None
        if processes > 1:
            raise SearchError(f"--train eviction takes one process, found {processes}")
        if SHARED in self.pattern.roles or "F" not in self.pattern.roles:
            raise SearchError(
                f"--pattern is {self.pattern.roles}, expected D and F: eviction heads serve layers that choose for"
                " themselves"
            )
        if self.steps < 1:
            raise SearchError("--steps is 0, expected at least one step")
        if self.batch_size % self.micro_batch_size:
            raise SearchError(
                f"--batch-size is {self.batch_size}, expected a multiple of --micro-batch-size ="
                f" {self.micro_batch_size}"
            )

    def rate(self, step: int) -> float:
        """What the peak learning rates are multiplied with at a step, counted from 0."""
        return rate(self.schedule, self.ramp_steps, step, self.steps)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "pattern": self.pattern.key, "train": "eviction"}
