"""The loss of indexers in Hugging Face's Trainer, with Accelerate, or in any loop over a transformers model.

    with IndexerLoss(model, pattern, "sparse").attached():
        Trainer(model, ...).train()

Inside the block the model attends as the stage says, and the loss that it returns includes that of its indexers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from indexcache_kernels.backends import Backend
from indexcache_kernels.transformers import INDEXER_ROPES, index_vectors
from indexcache_search.errors import NonFiniteLossError, SearchError
from indexcache_train.distill.model import Distillation, set_trainable
from indexcache_train.distill.settings import Loss, Stage
from indexcache_train.kernels.indexer_loss import gather_keys
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.transformers import attentions as dsa_attentions


class IndexerLoss(Distillation):
    """A DSA model of transformers whose own loss includes that of its indexers.

    It is the mean over queries of the sum over F layers of Equation 1, or divided by `num_items_in_batch` where Trainer
    gives that, as the model's own loss is. In the warm-up it is the only loss; while evaluating it is left out.

    Batches may be padded (`attention_mask`) or packed (`position_ids` that begin anew). With `group` each rank has as
    many tokens of the same sequences, in the order of the ranks, with `position_ids`, and `shift_labels` instead of
    `labels`; ranks average their gradients, as DDP and Accelerate do.

    Args:
        model: a `GlmMoeDsaForCausalLM` or `DeepseekV32ForCausalLM`. Its parameters become trainable as the stage asks.
        pattern: must be `S` on layers without an indexer.
        stage: `warmup`: attention is dense, and only the indexers of F layers train; `sparse`: everything does.
        loss: see `Distillation`.
        kernels: see `Distillation`; with them the warm-up takes no group.
        group: the process group that sequences are split over; None if they are not.

    Attributes:
        divergences: `[F layers]`, of the last training batch, means over queries of this rank; detached.

    Raises:
        PatternError: if the pattern does not fit the model.
        SearchError: if transformers calls the indexers in an unknown way.
    """

    def __init__(
        self,
        model: nn.Module,
        pattern: Pattern,
        stage: Stage,
        loss: Loss = "multi",
        kernels: Backend | None = None,
        *,
        group: Any = None,
    ) -> None:
        super().__init__(model, pattern, stage, loss, kernels)
        set_trainable(model, pattern, stage)
        self.divergences: Tensor | None = None
        self._group = group
        self._positions: Tensor | None = None  # of this rank's tokens, among all

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Change the model's forward pass inside the `with` block, and restore it afterwards.

        Weights may be read, written and saved there, as Trainer does; checkpoints are the model's own.
        """
        rope, own = INDEXER_ROPES[self.model.config.model_type], self.model.forward

        @functools.wraps(own)
        def forward(*args: Any, **inputs: Any) -> Any:
            return self._run(own, *args, **inputs)

        changes: list[tuple[Any, str, Any]] = [(self.model, "forward", forward)]
        for layer, attention in enumerate(dsa_attentions(self.model)):
            if attention.indexer is not None:
                vectors = partial(index_vectors, attention.indexer, rope)
                changes.append((attention.indexer, "forward", self._select(layer, vectors)))
        with self._attending(changes):
            yield

    def _run(self, own: Any, input_ids: Tensor | None = None, **inputs: Any) -> Any:
        """Run the model, and add the loss of its indexers."""
        tokens = inputs.get("inputs_embeds") if input_ids is None else input_ids
        if tokens is None:
            raise SearchError("input_ids and inputs_embeds are None, expected one of them")
        self._forget()
        counted = self._read_batch(tokens, inputs.get("attention_mask"), inputs.get("position_ids"))
        self._found = {layer: [] for layer in self.pattern.full_layers}
        try:
            outputs = own(input_ids=input_ids, **{"use_cache": False, **inputs})
            sums = torch.stack([torch.stack(items).sum() for items in self._found.values()])
        finally:
            self._found = None  # layers that run again for their gradients report nothing
        if not self.model.training:
            return outputs
        self.divergences = sums.detach() / counted
        items = inputs.get("num_items_in_batch")
        total = sums.sum() / (counted if items is None else items)
        if self.stage == "sparse" and outputs.get("loss") is not None:
            total = outputs["loss"] + total
        if not torch.isfinite(total):
            raise NonFiniteLossError(f"loss {total.item()}, KL {self.divergences.tolist()}; expected finite numbers")
        outputs["loss"] = total
        return outputs

    def _read_batch(self, tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> int:
        """Find out what each query sees, and return the number of queries that count."""
        batch, length = tokens.shape[:2]
        places = torch.arange(length, device=tokens.device).expand(batch, -1)
        if mask is not None and mask.ndim != 2:
            raise SearchError(f"attention_mask has {mask.ndim} dimensions, expected [batch, length]")
        padded = mask is not None and not mask.bool().all()
        positions = places if position_ids is None else position_ids.expand(batch, -1)
        if self._group is not None:
            if padded or position_ids is None:
                raise SearchError("sequences are split over ranks, expected position_ids and no padding")
            own = torch.arange(length, device=tokens.device)
            self._positions = own + length * torch.distributed.get_rank(self._group)
            places = self._positions.expand(batch, -1)
            positions = self._all_keys(positions, 1)
        every = torch.arange(positions.shape[1], device=tokens.device).expand(batch, -1)
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        starts = torch.where(begins, every, 0).cummax(1).values.gather(1, places)
        ends = places + 1
        if padded:
            assert mask is not None
            if begins[:, 1:][mask[:, 1:].bool() & mask[:, :-1].bool()].any():
                raise SearchError("position_ids begin anew in a padded batch, expected packed ones without padding")
            first = mask.int().argmax(1, keepdim=True)
            starts = torch.where(mask.bool(), first, places)  # padding sees itself, so that nothing is NaN
        if self.kernels is not None and self.stage == "warmup" and self._group is not None:
            raise SearchError("the warm-up is split over ranks, which its kernels don't take; expected kernels=None")
        self._see(starts, ends)
        return int(mask.sum()) if padded and mask is not None else batch * length

    def _all_keys(self, keys: Tensor, dim: int) -> Tensor:
        if self._group is None or not keys.numel():
            return keys
        assert self._positions is not None
        return gather_keys(keys.transpose(0, dim), self._positions, self._group).transpose(0, dim)


def parameter_groups(model: nn.Module, lr: float, indexer_lr: float) -> list[dict[str, Any]]:
    """Return the parameters that train as groups of an optimizer: those of indexers, and the body if it does."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    indexers = [parameter for name, parameter in trained if ".indexer." in name]
    body: Sequence[nn.Parameter] = [parameter for name, parameter in trained if ".indexer." not in name]
    groups: list[dict[str, Any]] = [{"params": indexers, "lr": indexer_lr, "weight_decay": 0.0}]
    return [*groups, {"params": list(body), "lr": lr}] if body else groups
