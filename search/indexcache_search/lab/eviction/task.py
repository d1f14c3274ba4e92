"""Training of eviction heads, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from indexcache_search.data.tokens import TokenSet
from indexcache_search.distill.result import losses_of
from indexcache_search.errors import NonFiniteLossError
from indexcache_search.evaluation import estimates, objectives
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.hf.device import LOGIT_ROWS
from indexcache_search.hf.roles import apply_roles
from indexcache_search.lab.eviction.heads import EvictionHeads
from indexcache_search.lab.eviction.settings import EvictionSettings
from indexcache_search.training.optimizer import adamw, clip, take_step
from indexcache_search.training.order import Order
from indexcache_search.training.processes import Processes
from sglang_indexcache import Pattern

STAGE = "eviction"


class EvictionTask:
    """The heads of one model, with its body or without, as a `training.loop.Task`.

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
        self.model: Any = model
        self.steps = (0, settings.steps)
        heads: EvictionHeads = model.importance
        for parameter in model.parameters():
            parameter.requires_grad_(settings.body)
        for parameter in heads.parameters():
            parameter.requires_grad_(True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        own = {id(parameter) for parameter in heads.parameters()}
        body = [item for item in model.parameters() if item.requires_grad and id(item) not in own]
        self.optimizer = adamw(
            list(heads.parameters()),
            body,
            own_lr=settings.heads_lr,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
        )
        self._order = Order(train.num_sequences, settings.seed)

    def step(self, number: int) -> dict[str, Any]:
        """Take one optimizer step.

        Raises:
            NonFiniteLossError: if a loss or gradient is NaN or infinite; the step is not taken.
        """
        settings, data = self._settings, self._train
        rows = self._order.step(number, settings.batch_size)
        scored, total = max(1, int(data.scored[rows][:, 1:].sum())), 0.0
        for start in range(0, len(rows), settings.micro_batch_size):
            part = rows[start : start + settings.micro_batch_size]
            total += float(self._losses(part, data, self._objective, 1 / scored).double().sum()) / scored
        norms = {f"norm_{name}": norm for name, norm in clip(self.optimizer, "heads", settings.max_norm).items()}
        if not np.isfinite([total, *norms.values()]).all():
            raise NonFiniteLossError(
                f"step {number + 1}: loss {total}, gradient norms"
                f" {', '.join(f'{name} {value}' for name, value in norms.items())}; expected finite numbers"
            )
        factor = settings.rate(number)
        take_step(self.optimizer, factor)
        measured = {"loss" if settings.body else "kl": total, **norms}
        return {"step": number + 1, "stage": STAGE, **measured, "lr_factor": factor}

    @torch.no_grad()
    def evaluate(self, pattern: Pattern | None = None) -> dict[str, Any]:
        """Measure held-out losses with the run's pattern, or another one.

        Returns:
            `losses`: sum over each sequence's scored tokens; `tokens`: their number; `held_out_loss`: mean over tokens,
            then over sources; `held_out_kl`: likewise, to the same weights with attention to everything.
        """
        pattern, data = pattern or self._settings.pattern, self._held_out
        self.model.eval()
        sums = {
            objective: [
                float(self._losses(np.array([row]), data, objective, None, pattern))
                for row in range(data.num_sequences)
            ]
            for objective in ("nll", "kl")
        }
        self.model.train()
        tokens = data.scored[:, 1:].sum(1).tolist()
        loss, divergence = (losses_of(sums[objective], tokens) for objective in ("nll", "kl"))
        return {
            "held_out_loss": estimates.loss(loss, data).mean,
            "held_out_kl": estimates.loss(divergence, data).mean,
            "losses": sums["nll"],
            "divergences": sums["kl"],
            "tokens": tokens,
        }

    @property
    def _objective(self) -> Objective:
        return "nll" if self._settings.body else "kl"

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
            targets = torch.from_numpy(np.flatnonzero(counts[1:])).to(tokens.device)  # positions that predict them
            labels = tokens[number, targets + 1]
            total = hidden.new_zeros((), dtype=torch.float32)
            for start in range(0, len(targets), LOGIT_ROWS):
                block = targets[start : start + LOGIT_ROWS]
                teacher = None if dense is None else dense[number, block]
                total = total + checkpoint(
                    self._block, hidden[number, block], labels[start : start + LOGIT_ROWS], teacher, use_reentrant=False
                )
            sums.append(total)
        return torch.stack(sums)

    def _block(self, hidden: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the sum of some tokens' losses; their logits are computed again for the gradients."""
        logits = F.linear(hidden.float(), self._head.float())
        if teacher is None:
            return objectives.nll(logits, labels).sum()
        with torch.no_grad():
            wanted = F.linear(teacher.float(), self._head.float())
        return objectives.kl(logits, wanted).sum()

    @property
    def _head(self) -> Tensor:
        head: nn.Linear = self.model.lm_head
        return head.weight
