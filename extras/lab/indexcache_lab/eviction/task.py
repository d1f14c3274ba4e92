"""Training of eviction heads, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from indexcache_lab.eviction.heads import BiasUse
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import SearchError
from indexcache_search.evaluation import estimates, objectives
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.hf.device import LOGIT_ROWS
from indexcache_search.hf.roles import apply_roles
from indexcache_train.distill.result import losses_of
from indexcache_train.distill.settings import TrainingSettings, rate
from indexcache_train.training.loop import Task
from indexcache_train.training.optimizer import adamw, take_step
from indexcache_train.training.order import rows_of_step
from indexcache_train.training.processes import Processes
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import SHARED

STAGE = "eviction"


@dataclass(frozen=True, kw_only=True)
class EvictionSettings(TrainingSettings):
    """Inputs of the heads; the pattern is of D and F, with a selection whose steps are `nosa` with heads.

    Attributes:
        use: when the heads' bias is added, see `EvictionHeads`.
        detach: give values no gradient through the bias.
        body: train the model, too, by the language modelling loss. Otherwise only the heads learn, from the divergence
            to the model with attention to everything.
        steps: number of steps.
        heads_lr: peak learning rate of the heads.
    """

    use: BiasUse
    detach: bool
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


class EvictionTask(Task):
    """The heads of one model, with its body or without.

    Args:
        processes: the single process of the run.
        model: has eviction heads.
        settings: of the run.
        train: training sequences; `scored` marks the tokens of the loss.
        held_out: evaluation sequences.
    """

    stage = STAGE

    def __init__(
        self, processes: Processes, model: Any, settings: EvictionSettings, train: TokenSet, held_out: TokenSet
    ) -> None:
        self._processes, self._settings = processes, settings
        self._train, self._held_out = train, held_out
        self.model = model
        self.steps = (0, settings.steps)
        model.requires_grad_(settings.body)
        model.importance.requires_grad_(True)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for parameter in trained.values():
            parameter.data = parameter.data.float()
        body = [parameter for name, parameter in trained.items() if not name.startswith("importance.")]
        heads = list(model.importance.parameters())
        self.optimizer = adamw(
            heads, body, own_lr=settings.heads_lr, lr=settings.lr, weight_decay=settings.weight_decay
        )

    def step(self, number: int) -> dict[str, Any]:
        """Take one optimizer step.

        Raises:
            NonFiniteLossError: if a loss or gradient is NaN or infinite; the step is not taken.
        """
        settings, data = self._settings, self._train
        objective: Objective = "nll" if settings.body else "kl"
        rows = rows_of_step(number, settings.batch_size, data.num_sequences, settings.seed)
        scored, total = max(1, int(data.scored[rows][:, 1:].sum())), 0.0
        for start in range(0, len(rows), settings.micro_batch_size):
            part = rows[start : start + settings.micro_batch_size]
            total += float(self._losses(part, data, objective, 1 / scored).double().sum()) / scored
        name, factor = f"step {number + 1}", rate(settings.schedule, settings.ramp_steps, number, settings.steps)
        taken = take_step(self.optimizer, name, {"loss": total}, "heads", settings.max_norm, factor=factor)
        return {"step": number + 1, "stage": STAGE, "loss" if settings.body else "kl": total, **taken}

    @torch.no_grad()
    def evaluate(self, pattern: Pattern | None = None) -> dict[str, Any]:
        """Measure held-out losses with the run's pattern, or another one.

        Returns:
            `losses`: sum over each sequence's scored tokens; `tokens`: their number; `held_out_loss`: mean over tokens,
            then over sources; `held_out_kl`: likewise, to the same weights with attention to everything.
        """
        data, tokens = self._held_out, self._held_out.scored[:, 1:].sum(1).tolist()
        rows = [np.array([row]) for row in range(data.num_sequences)]
        self.model.eval()
        losses = [float(self._losses(row, data, "nll", None, pattern)) for row in rows]
        divergences = [float(self._losses(row, data, "kl", None, pattern)) for row in rows]
        self.model.train()
        return {
            "held_out_loss": estimates.loss(losses_of(losses, tokens), data).mean,
            "held_out_kl": estimates.loss(losses_of(divergences, tokens), data).mean,
            "losses": losses,
            "divergences": divergences,
            "tokens": tokens,
        }

    def _losses(
        self,
        rows: NDArray[np.int64],
        data: TokenSet,
        objective: Objective,
        weight: float | None,
        pattern: Pattern | None = None,
    ) -> Tensor:
        """Return the sum of each sequence's scored losses, `[sequences]`; with a `weight`, accumulate their gradients.

        Backward passes run while the roles are applied, since gradient checkpointing runs layers again.
        """
        tokens = torch.from_numpy(data.tokens[rows].astype(np.int64)).to(self._processes.device)
        prompt = None if data.prompt is None else torch.from_numpy(data.prompt[rows]).to(tokens.device)
        dense = None
        if objective == "kl":
            with torch.no_grad(), self._processes.autocast():
                dense = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        with apply_roles(self.model, pattern or self._settings.pattern, prompt=prompt):
            with self._processes.autocast():
                hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
            sums = self._sums(hidden, dense, tokens, data.scored[rows])
            if weight is not None:
                torch.autograd.backward(sums.sum() * weight)
        return sums.detach()

    def _sums(self, hidden: Tensor, dense: Tensor | None, tokens: Tensor, scored: NDArray[np.bool_]) -> Tensor:
        sums = []
        for number, counts in enumerate(scored):
            positions = torch.from_numpy(np.flatnonzero(counts[1:])).to(tokens.device)  # that predict scored tokens
            total = hidden.new_zeros((), dtype=torch.float32)
            for block in torch.split(positions, LOGIT_ROWS):
                teacher = None if dense is None else dense[number, block]
                labels = tokens[number, block + 1]
                total = total + checkpoint(self._block, hidden[number, block], labels, teacher, use_reentrant=False)
            sums.append(total)
        return torch.stack(sums)

    def _block(self, hidden: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the sum of some tokens' losses; their logits are computed again for the gradients."""
        head = self.model.lm_head.weight.float()
        logits = F.linear(hidden.float(), head)
        if teacher is None:
            return objectives.nll(logits, labels).sum()
        with torch.no_grad():
            truth = F.linear(teacher.float(), head)
        return objectives.kl(logits, truth).sum()
