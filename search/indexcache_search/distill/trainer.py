"""The training loop of one stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from indexcache_kernels.backends import Backend
from indexcache_kernels.patching import replaced
from indexcache_search import estimates
from indexcache_search.data.tokens import TokenSet
from indexcache_search.distill.checkpoints import Checkpoints
from indexcache_search.distill.data import Order
from indexcache_search.distill.log import TrainingLog
from indexcache_search.distill.model import Distillation, set_trainable
from indexcache_search.distill.processes import Processes
from indexcache_search.distill.result import as_evaluation
from indexcache_search.distill.settings import Intervals, Settings, Stage
from indexcache_search.distill.sharding import shard
from indexcache_search.errors import NonFiniteLossError
from sglang_indexcache import Pattern

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Watch:
    """Who wants to hear of a run: `record` each step's record, `show` lines for people."""

    record: Callable[[dict[str, Any]], None]
    show: Callable[[dict[str, Any]], None]


class StageTrainer:
    """Trains one stage of one model.

    Args:
        processes: which train together.
        model: as loaded, in the first process.
        settings: of the run.
        stage: to train.
        train: training sequences; `scored` says which tokens count in the language modelling loss.
        held_out: evaluation sequences.
        kernels: see `Distillation`.
    """

    def __init__(
        self,
        processes: Processes,
        model: Any,
        settings: Settings,
        stage: Stage,
        train: TokenSet,
        held_out: TokenSet,
        kernels: Backend | None = None,
    ) -> None:
        self._processes, self._settings, self._stage = processes, settings, stage
        self._train, self._held_out = train, held_out
        set_trainable(model, settings.pattern, stage)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        self.model = shard(model, processes)
        self._optimizer = torch.optim.AdamW(self._groups(self.model), betas=BETAS)
        self.distillation = Distillation(self.model, settings.pattern, stage, settings.loss, kernels)
        self._order = Order(train.num_sequences, settings.seed)

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        settings, warmup = self._settings, self._stage == "warmup"
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        indexers = [p for name, p in named if ".indexer." in name]
        body = [p for name, p in named if ".indexer." not in name]
        groups = [
            {"params": indexers, "peak": settings.warmup_lr if warmup else settings.indexer_lr, "weight_decay": 0.0},
            {"params": [p for p in body if p.ndim > 1], "peak": settings.lr, "weight_decay": settings.weight_decay},
            {"params": [p for p in body if p.ndim < 2], "peak": settings.lr, "weight_decay": 0.0},
        ]
        return [{**group, "lr": group["peak"]} for group in groups if group["params"]]

    def train(
        self, done: int, checkpoints: Checkpoints, log: TrainingLog | None, watch: Watch, intervals: Intervals
    ) -> None:
        """Run this stage to its end, from the checkpoint at `done` steps where it has begun before.

        Raises:
            NonFiniteLossError: if a loss or gradient is NaN or infinite; the step is not taken.
        """
        first, last = self._settings.range(self._stage)
        if done > first:
            checkpoints.load(done, self.model, self._optimizer)
        self.model.train()
        device = self._processes.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        while done < last:
            began = time.monotonic()
            record = self._step(done)
            done += 1
            record["seconds"] = round(time.monotonic() - began, 3)
            if device.type == "cuda":
                record["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
            self._note(record, log, watch.record)
            if done % intervals.show == 0 or done in (1, last):
                watch.show(record)
            if done % intervals.evaluate == 0 or done == last:
                found = {"step": done, "stage": self._stage, **self.evaluate(self.distillation)}
                self._note(found, log, watch.show)
            if done % intervals.checkpoint == 0 or done == last:
                checkpoints.save(done, self.model, self._optimizer)

    @staticmethod
    def _note(record: dict[str, Any], log: TrainingLog | None, watch: Callable[[dict[str, Any]], None]) -> None:
        if log is not None:
            log.add(record)
        watch(record)

    def _step(self, step: int) -> dict[str, Any]:
        """One optimizer step: forward and backward of all sequences of a batch, scaled to the means over all of it."""
        settings, processes = self._settings, self._processes.count
        rows = self._order.step(step, settings.batch_size)
        weights = self._train.scored[rows][:, 1:]
        scored, queries = max(1, int(weights.sum())), rows.size * self._train.seq_len
        own = np.array_split(rows, processes)[self._processes.index]
        sums = torch.zeros(1 + len(settings.pattern.full_layers), dtype=torch.float64)
        with self.distillation.attached():
            for start in range(0, len(own), settings.micro_batch_size):
                part = own[start : start + settings.micro_batch_size]
                losses, divergences = self._forward(self.distillation, part, self._train)
                total = losses.sum() / scored + divergences.sum() / queries
                torch.autograd.backward(total * processes)  # FSDP averages gradients over processes
                sums += torch.cat([losses.detach().sum()[None], divergences.detach()]).double().cpu()
        sums = self._processes.sum(sums)
        norms = self._clip()
        factor = settings.rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        record = self._record(step + 1, sums[0].item() / scored, (sums[1:] / queries).tolist(), norms, factor)
        if not np.isfinite([record.get("loss", 0.0), record["kl"], *norms.values()]).all():
            raise NonFiniteLossError(
                f"step {step + 1} ({self._stage}): loss {record.get('loss', 0.0)}, KL {record['kl']}, gradient norms"
                f" {', '.join(f'{name} {value}' for name, value in norms.items())}; expected finite numbers"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return record

    def _record(
        self, step: int, loss: float, divergences: list[float], norms: dict[str, float], factor: float
    ) -> dict[str, Any]:
        layers = self._settings.pattern.full_layers
        return {
            "step": step,
            "stage": self._stage,
            **({} if self._stage == "warmup" else {"loss": loss}),
            "kl": sum(divergences) / len(divergences),
            "kl_layers": dict(zip(map(str, layers), divergences, strict=True)),
            **{f"norm_{name}": value for name, value in norms.items()},
            "lr_factor": factor,
        }

    def _forward(self, distillation: Distillation, rows: NDArray[np.int64], data: TokenSet) -> tuple[Tensor, Tensor]:
        """Sum of each sequence's scored losses, `[sequences]` (0 in the warm-up), and of each indexer's divergences."""
        device = self._processes.device
        tokens = torch.from_numpy(data.tokens[rows].astype(np.int64)).to(device)
        with self._processes.autocast():
            output = distillation(tokens)
        if output.token_losses is None:
            return output.divergences.new_zeros(len(rows)), output.divergences
        weights = torch.from_numpy(data.scored[rows][:, 1:]).to(device)
        return (output.token_losses * weights).double().sum(1), output.divergences

    def _clip(self) -> dict[str, float]:
        """Clip the gradients of indexers and body, each for itself, and return their norms."""
        norms = {}
        indexers, *body = (group["params"] for group in self._optimizer.param_groups)
        for name, parameters in (("indexers", indexers), ("body", [p for group in body for p in group])):
            if parameters:
                norm = clip_grad_norm_(parameters, self._settings.max_norm)
                norms[name] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        return norms

    def evaluate_before(self, native: Pattern, log: TrainingLog | None, watch: Watch) -> None:
        """Record what the untrained model does with its own pattern, and with the one to be trained."""
        for name, pattern in (("original", native), ("training-free", self._settings.pattern)):
            kernels, loss = self.distillation.kernels, self.distillation.loss
            found = self.evaluate(Distillation(self.model, pattern, "sparse", loss, kernels))
            self._note({"step": 0, "stage": name, **found}, log, watch.show)

    @torch.no_grad()
    def evaluate(self, distillation: Distillation) -> dict[str, Any]:
        """Held-out losses of the model as it will be served, which is sparse.

        Returns:
            `losses`: sum over each sequence's scored tokens; `tokens`: how many those are; `held_out_loss`: mean over
            tokens, then over sources; `held_out_kl`: mean over queries and indexers.
        """
        data, processes = self._held_out, self._processes.count
        size = self._settings.micro_batch_size
        losses = torch.zeros(data.num_sequences + 1, dtype=torch.float64)  # the divergences come last
        self.model.eval()
        with replaced((distillation, "stage", "sparse")), distillation.attached():
            for turn in range(-(-data.num_sequences // (size * processes))):
                first = (turn * processes + self._processes.index) * size
                rows = np.arange(first, min(first + size, data.num_sequences))
                # FSDP's calls are collective: a process that has nothing left runs a sequence for nobody.
                found, divergences = self._forward(distillation, rows if rows.size else np.arange(1), data)
                if rows.size:
                    losses[rows], losses[-1] = found.cpu(), losses[-1] + divergences.sum().item()
        self.model.train()
        losses = self._processes.sum(losses)
        parts = data.num_sequences * data.seq_len * len(distillation.pattern.full_layers)
        tokens = data.scored[:, 1:].sum(1).tolist()
        evaluation = as_evaluation(losses[:-1].tolist(), tokens, distillation.pattern)
        return {
            "held_out_loss": estimates.loss(evaluation, data).mean,
            "held_out_kl": losses[-1].item() / parts,
            "losses": list(evaluation.losses),
            "tokens": tokens,
        }
