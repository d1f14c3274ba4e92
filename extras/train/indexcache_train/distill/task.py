"""A stage of a distillation, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indexcache_kernels.backends import Backend
from indexcache_kernels.patching import replaced
from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation import estimates
from indexcache_train.distill.model import Distillation, set_trainable, sharding_units
from indexcache_train.distill.result import losses_of
from indexcache_train.distill.settings import DistillSettings, Stage
from indexcache_train.training.loop import Task
from indexcache_train.training.optimizer import adamw, take_step
from indexcache_train.training.order import rows_of_step
from indexcache_train.training.processes import Processes
from indexcache_train.training.sharding import shard
from sglang_indexcache import Pattern


class StageTask(Task):
    """One stage of one model.

    Args:
        processes: all processes of the run.
        model: as loaded, in the first process.
        settings: of the run.
        stage: the stage to train.
        train: training sequences; `scored` marks the tokens of the language modelling loss.
        held_out: evaluation sequences.
        kernels: see `Distillation`.
    """

    def __init__(
        self,
        processes: Processes,
        model: Any,
        settings: DistillSettings,
        stage: Stage,
        train: TokenSet,
        *,
        held_out: TokenSet,
        kernels: Backend | None = None,
    ) -> None:
        self._processes, self._settings, self.stage = processes, settings, stage
        self.steps = settings.range(stage)
        self._train, self._held_out = train, held_out
        set_trainable(model, settings.pattern, stage)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        self.model = shard(model, sharding_units(model), processes)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = adamw(
            [p for name, p in named if ".indexer." in name],
            [p for name, p in named if ".indexer." not in name],
            own_lr=settings.warmup_lr if stage == "warmup" else settings.indexer_lr,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
        )
        self.distillation = Distillation(self.model, settings.pattern, stage, settings.loss, kernels)

    def step(self, number: int) -> dict[str, Any]:
        """Take one optimizer step: forward and backward of a batch's sequences, scaled to the means over the batch.

        Raises:
            NonFiniteLossError: if a loss or gradient is NaN or infinite; the step is not taken.
        """
        settings, processes = self._settings, self._processes.count
        rows = rows_of_step(number, settings.batch_size, self._train.num_sequences, settings.seed)
        weights = self._train.scored[rows][:, 1:]
        scored, queries = max(1, int(weights.sum())), rows.size * self._train.seq_len
        own = np.array_split(rows, processes)[self._processes.index]
        layers = settings.pattern.full_layers
        sums = torch.zeros(1 + len(layers), dtype=torch.float64)
        with self.distillation.attached():
            for start in range(0, len(own), settings.micro_batch_size):
                micro_batch = own[start : start + settings.micro_batch_size]
                losses, divergences = self._forward(self.distillation, micro_batch, self._train)
                total = losses.sum() / scored + divergences.sum() / queries
                torch.autograd.backward(total * processes)  # FSDP averages gradients over processes
                sums += torch.cat([losses.detach().sum()[None], divergences.detach()]).double().cpu()
        sums = self._processes.sum(sums)
        by_layer = (sums[1:] / queries).tolist()
        loss, kl = sums[0].item() / scored, sum(by_layer) / len(by_layer)
        name, measured, factor = f"step {number + 1} ({self.stage})", {"loss": loss, "KL": kl}, settings.rate(number)
        return {
            "step": number + 1,
            "stage": self.stage,
            **({} if self.stage == "warmup" else {"loss": loss}),
            "kl": kl,
            "kl_layers": dict(zip(map(str, layers), by_layer, strict=True)),
            **take_step(self.optimizer, name, measured, "indexers", settings.max_norm, factor=factor),
        }

    def _forward(self, distillation: Distillation, rows: NDArray[np.int64], data: TokenSet) -> tuple[Tensor, Tensor]:
        """Return sums of scored losses by sequence, `[sequences]` (0 in the warm-up), and of divergences by indexer."""
        device = self._processes.device
        tokens = torch.from_numpy(data.tokens[rows].astype(np.int64)).to(device)
        starts = None if data.starts is None else torch.from_numpy(data.starts[rows]).to(device)
        with self._processes.autocast():
            output = distillation(tokens, starts)
        if output.token_losses is None:
            return output.divergences.new_zeros(len(rows)), output.divergences
        weights = torch.from_numpy(data.scored[rows][:, 1:]).to(device)
        return (output.token_losses * weights).double().sum(1), output.divergences

    @torch.no_grad()
    def evaluate(self, pattern: Pattern | None = None, dense: bool = False) -> dict[str, Any]:
        """Measure held-out losses of the model as it will be served, which is sparse.

        Args:
            pattern: another one than the model trains for.
            dense: instead measure those of the model without a selection.

        Returns:
            `losses`: sum over each sequence's scored tokens; `tokens`: their number; `held_out_loss`: mean over tokens,
            then over sources; `held_out_kl`: mean over queries and indexers.
        """
        distillation = self.distillation
        if pattern is not None:
            distillation = Distillation(self.model, pattern, "sparse", distillation.loss, distillation.kernels)
        data, processes = self._held_out, self._processes.count
        size = self._settings.micro_batch_size
        losses = torch.zeros(data.num_sequences + 1, dtype=torch.float64)  # the divergences come last
        self.model.eval()
        how = ("stage", "warmup" if dense else "sparse"), ("measures_dense", dense)
        with replaced(*((distillation, *change) for change in how)), distillation.attached():
            for turn in range(-(-data.num_sequences // (size * processes))):
                first = (turn * processes + self._processes.index) * size
                rows = np.arange(first, min(first + size, data.num_sequences))
                # FSDP's calls are collective, so a process without sequences runs one and drops the result.
                own_losses, divergences = self._forward(distillation, rows if rows.size else np.arange(1), data)
                if rows.size:
                    losses[rows], losses[-1] = own_losses.cpu(), losses[-1] + divergences.sum().item()
        self.model.train()
        losses = self._processes.sum(losses)
        parts = data.num_sequences * data.seq_len * len(distillation.pattern.full_layers)
        tokens = data.scored[:, 1:].sum(1).tolist()
        evaluation = losses_of(losses[:-1].tolist(), tokens)
        return {
            "held_out_loss": estimates.loss(evaluation, data).mean,
            "held_out_kl": losses[-1].item() / parts,
            "losses": list(evaluation.losses),
            "tokens": tokens,
        }
