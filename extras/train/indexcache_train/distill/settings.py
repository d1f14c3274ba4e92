"""Settings of a distillation run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from indexcache_search.errors import SearchError
from indexcache_train.training.settings import Intervals
from sglang_indexcache import Pattern
from sglang_indexcache.families.refused import renamed

Stage = Literal["warmup", "sparse"]
Loss = Literal["multi", "own"]
Schedule = Literal["cosine", "wsd", "constant"]

DEEPSEEK, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
DENSE_MLA: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Glm4MoeLiteForCausalLM": GLM,
}
"""Architectures of dense models with latent attention (MLA), and the DSA architecture that each becomes."""

COSINE_FLOOR = 0.1  # of the peak, at the end
WSD_DECAY = 0.2  # of a stage's steps


def dense_architecture(config: Mapping[str, Any]) -> str | None:
    """Return the first of `DENSE_MLA` among the architectures of a config.json."""
    given = renamed(config).get("architectures")
    return next((item for item in map(str, given if isinstance(given, list) else ()) if item in DENSE_MLA), None)


def rate(schedule: Schedule, ramp_steps: int, done: int, total: int) -> float:
    """Return the factor of the peak learning rates when `done` of `total` steps are done."""
    ramp = min(1.0, (done + 1) / max(1, min(ramp_steps, total)))
    if schedule == "constant":
        return ramp
    if schedule == "wsd":
        return ramp * min(1.0, (total - done) / max(1.0, total * WSD_DECAY))
    return ramp * (COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * done / total)))


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """All inputs of the trained weights beside model and data.

    Attributes:
        pattern: the pattern that the model will be served with.
        lr: peak learning rate of the body.
        schedule: after the ramp: `cosine` to a tenth; `wsd` stays and falls to 0 over the last fifth; `constant`.
        ramp_steps: length of the linear ramp that each stage begins with.
        batch_size: sequences a step, of all processes together.
        micro_batch_size: sequences a forward of one process.
        weight_decay: AdamW's, on the body's matrices.
        max_norm: limit of the gradient norm, of the body and of the other weights separately.
        seed: seed of the order of the training sequences.
    """

    pattern: Pattern
    lr: float = 7.3e-6
    schedule: Schedule = "cosine"
    ramp_steps: int = 50
    batch_size: int = 16
    micro_batch_size: int = 1
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 0

    def check(self, processes: int) -> None:
        """Check settings that depend on the number of processes.

        Raises:
            SearchError: if batches can't be divided.
        """
        if self.batch_size % (self.micro_batch_size * processes):
            raise SearchError(
                f"--batch-size is {self.batch_size}, expected a multiple of micro_batch x processes ="
                f" {self.micro_batch_size} x {processes}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {**asdict(self), "pattern": self.pattern.key}


@dataclass(frozen=True, kw_only=True)
class DistillSettings(TrainingSettings):
    """Settings of distillation.

    Attributes:
        loss: see `Distillation`.
        warmup_steps: steps of the dense warm-up; 0 leaves it out.
        sparse_steps: steps of sparse training; 0 leaves it out.
        warmup_lr: peak learning rate of the indexers in the warm-up.
        indexer_lr: peak learning rate of the indexers in sparse training.
    """

    loss: Loss = "multi"
    warmup_steps: int = 1000
    sparse_steps: int = 4000
    warmup_lr: float = 1e-3
    indexer_lr: float = 7.3e-6

    @property
    def steps(self) -> int:
        """Steps of both stages."""
        return self.warmup_steps + self.sparse_steps

    def range(self, stage: Stage) -> tuple[int, int]:
        """Return the first step of a stage, and one past its last."""
        return (0, self.warmup_steps) if stage == "warmup" else (self.warmup_steps, self.steps)

    def check(self, processes: int) -> None:
        """Check that there is a step; see `TrainingSettings.check`."""
        if self.steps < 1:
            raise SearchError("--warmup and --sparse have both steps=0, expected at least one step")
        super().check(processes)

    def rate(self, step: int) -> float:
        """Return the factor of the peak learning rates at a step, counted from 0; each stage has its own curve."""
        first, end = self.range("warmup" if step < self.warmup_steps else "sparse")
        return rate(self.schedule, self.ramp_steps, step - first, end - first)


@dataclass(frozen=True, kw_only=True)
class IndexerSize:
    """Sizes of the indexers that a dense model gets, by default those of GLM-5.

    Attributes:
        heads: index heads.
        dim: dimensions of an index query and key; at least those of the model's rotary embeddings.
        topk: tokens that each query selects.
    """

    heads: int = 32
    dim: int = 128  # all that SGLang serves
    topk: int = 2048


@dataclass(frozen=True, kw_only=True)
class TrainingRuntime:
    """Settings of how a run trains; see `indexcache-distill --help-all`.

    Attributes:
        device: `auto` or `cpu`.
        dtype: of computations: `auto`, `float32` or `bfloat16`. Weights that train are always float32.
        attention: `auto`, `naive` or `kernels`.
        keep_shared: write the indexers of S layers, too. None: only where transformers needs them.
    """

    device: str
    dtype: str
    gradient_checkpointing: bool
    intervals: Intervals
    attention: str = "auto"
    check_memory: bool = True
    keep_shared: bool | None = None
    tensorboard: bool = False
