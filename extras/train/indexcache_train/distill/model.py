"""DSA models of transformers in training: dense or sparse attention, and indexers that learn from all they serve.

Three graphs never meet. The body learns from the language modelling loss alone. Each retained indexer learns from the
detached attention of the layers that it serves, and its inputs are detached, too. Its selection has no gradient. So a
single backward pass through the sum of both losses gives every parameter its own loss's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from indexcache_kernels.backends import Backend
from indexcache_kernels.indexer_topk.naive import indexer_scores
from indexcache_kernels.patching import replaced
from indexcache_kernels.transformers import INDEXER_ROPES, index_vectors, keep_latent, select
from indexcache_search.hf.device import LOGIT_ROWS
from indexcache_search.hf.indexers import check_call
from indexcache_train.distill.kernel_attention import Vectors, attend_and_compare, computed_in, range_mask
from indexcache_train.distill.losses import divergence
from indexcache_train.distill.settings import Loss, Stage
from indexcache_train.kernels.indexer_kl import visible_keys
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.transformers import attentions as dsa_attentions

NAME = "indexcache_distill"  # among transformers' attention implementations


@dataclass(frozen=True)
class Output:
    """Result of one forward pass.

    Attributes:
        token_losses: `[batch, length - 1]`, float32, of the tokens after the first; None if they are not measured.
        divergences: `[F layers]`, float32: loss of each retained indexer, summed over all queries.
    """

    token_losses: Tensor | None
    divergences: Tensor


def set_trainable(model: nn.Module, pattern: Pattern, stage: Stage) -> None:
    """Make trainable the indexers of F layers, and in the sparse stage the body."""
    for parameter in model.parameters():
        parameter.requires_grad_(stage == "sparse")
    for layer, attention in enumerate(dsa_attentions(model)):
        if attention.indexer is not None:
            attention.indexer.requires_grad_(pattern[layer] == "F")


def sharding_units(model: Any) -> list[nn.Module]:
    """List the indexers, then the decoder layers; other layers' losses reach an indexer, so it is a unit of its own."""
    return [*(item.indexer for item in dsa_attentions(model) if item.indexer is not None), *model.model.layers]


class Distillation:
    """A DSA model that runs with `pattern` and measures the losses of its indexers.

    Warm-up: attention is dense, and divergences are over all keys that a query sees. Sparse: attention and divergences
    are over the keys that the layer's source has selected.

    Args:
        model: a `GlmMoeDsaForCausalLM` or `DeepseekV32ForCausalLM`, sharded by FSDP2 or not.
        pattern: must be `S` on layers without an indexer.
        stage: `warmup` or `sparse`; may be set to the other between forward passes.
        loss: `multi` is Eq. 1; `own` is each indexer against its own layer only, the paper's ablation.
        kernels: backend of the project's kernels, which need no `[queries, keys]` tensor; None computes in PyTorch.

    Raises:
        PatternError: if the pattern does not fit the model.
        SearchError: if transformers calls the indexers in an unknown way.
    """

    def __init__(
        self, model: nn.Module, pattern: Pattern, stage: Stage, loss: Loss = "multi", kernels: Backend | None = None
    ) -> None:
        attentions = dsa_attentions(model)
        for attention in attentions:
            if attention.indexer is not None:
                check_call(attention.indexer)
        pattern.check_fits(len(attentions), [layer for layer, item in enumerate(attentions) if item.indexer is None])
        self.model: Any = model
        self.pattern, self.stage, self.loss, self.kernels = pattern, stage, loss, kernels
        self.measures_dense = False  # in the warm-up, the losses of tokens: those of the dense model
        self._served = {source: pattern.source_layers.count(source) for source in pattern.full_layers}
        self._labels: Tensor | None = None
        self._ranges: Tensor  # first keys and ends of the queries, `[batch, 1, queries, 2]`
        self._block_mask: BlockMask | None = None  # of these ranges, for dense attention by kernels
        self._indices: dict[int, Tensor] = {}
        self._vectors: dict[int, Vectors] = {}  # inputs of the kernels' scores
        self._log_q: dict[int, Tensor] = {}
        self._found: dict[int, list[Tensor]] | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Change the model's forward pass inside the `with` block, and restore it afterwards.

        Backward passes belong in the block, since gradient checkpointing runs layers again. Reading or writing weights
        by name does not, since the indexers are replaced there.
        """
        head, rope = self.model.lm_head, INDEXER_ROPES[self.model.config.model_type]
        changes: list[tuple[Any, str, Any]] = [(head, "forward", partial(self._losses_of_tokens, head))]
        for layer, attention in enumerate(dsa_attentions(self.model)):
            if attention.indexer is None:
                continue
            if self.pattern[layer] == "F":
                changes.append((attention.indexer, "forward", partial(index_vectors, attention.indexer, rope)))
            changes.append((attention, "indexer", self._select(layer, attention.indexer)))
        with self._attending(changes):
            yield

    @contextmanager
    def _attending(self, changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
        """Attend by `attend` inside the `with` block."""
        config = self.model.config
        without_autocast = torch.autocast(self.model.device.type, enabled=False)
        gates = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        # Routers compute in float32, which autocast would undo.
        more = [(gate, "forward", without_autocast(gate.forward)) for gate in gates]
        for attention in dsa_attentions(self.model):
            more.append((attention, "distillation", self))
            if self.kernels is not None:
                more.append((attention, "expand_kv", keep_latent))
        before = config._attn_implementation
        config._attn_implementation = NAME
        try:
            with replaced(*more, *changes):
                yield
        finally:
            config._attn_implementation = before
            self._forget()

    def __call__(self, tokens: Tensor, starts: Tensor | None = None) -> Output:
        """Run sequences, causal and without padding, inside `attached()`.

        Args:
            tokens: `[batch, length]`, int64.
            starts: `[batch, length]`: where a token's document begins, before which it sees nothing; None for 0. The
                losses of first tokens of documents mean nothing.
        """
        self._forget()
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._see(starts, places + 1)
        self._labels, self._found = tokens[:, 1:], {layer: [] for layer in self.pattern.full_layers}
        try:
            positions = {} if starts is None else {"position_ids": places - starts}
            losses = self.model(input_ids=tokens, use_cache=False, **positions).logits
            divergences = torch.stack([torch.stack(items).sum() for items in self._found.values()])
        finally:
            self._found = None  # layers that run again for their gradients report nothing
        return Output(losses.view_as(self._labels) if self._measures_tokens else None, divergences)

    @property
    def _measures_tokens(self) -> bool:
        return self.stage == "sparse" or self.measures_dense

    def _forget(self) -> None:
        for kept in (self._indices, self._vectors, self._log_q):
            kept.clear()

    def _losses_of_tokens(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        """Replace the output head: return losses instead of logits, computed by blocks of rows, `[all tokens]`."""
        assert self._labels is not None
        if not self._measures_tokens:
            return hidden.new_zeros(self._labels.numel())

        def losses(rows: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(rows, head.weight, head.bias).float(), labels, reduction="none")

        blocks = zip(
            torch.split(hidden[:, :-1].flatten(0, 1), LOGIT_ROWS),
            torch.split(self._labels.flatten(), LOGIT_ROWS),
            strict=True,
        )
        blocks_of_losses = [checkpoint(losses, rows, labels, use_reentrant=False) for rows, labels in blocks]
        return torch.cat(blocks_of_losses)

    def _all_keys(self, keys: Tensor, dim: int) -> Tensor:
        """Return the keys that this process's queries see, along `dim`: here they are all its own."""
        return keys

    def _see(self, starts: Tensor | None, ends: Tensor) -> None:
        """Set the first keys that the queries of the next pass see, and one past the last, both `[batch, queries]`.

        Without `starts` all begin at 0, which asks nothing of the device.
        """
        first = torch.zeros_like(ends) if starts is None else starts
        self._ranges, self._block_mask = torch.stack([first, ends], dim=-1).int()[:, None], None
        if starts is not None and self.kernels is not None and self.stage == "warmup" and starts.any():
            self._block_mask = range_mask(self._ranges)

    def _select(self, layer: int, indexer: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[..., Tensor]:
        """Make the function that replaces a layer's indexer; `indexer` computes its vectors."""

        def full(
            hidden_states: Tensor,
            q_resid: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            *_: Any,
            **__: Any,
        ) -> Tensor:
            q, k, weights = indexer(hidden_states.detach(), q_resid.detach(), position_embeddings)
            k, ranges = self._all_keys(k, 1), self._ranges[:, 0]
            if self.kernels is not None:
                q, k = computed_in(q), computed_in(k)
            indices: Tensor = q.new_empty(0, dtype=torch.int32)  # none are selected in the warm-up
            with torch.autocast(q.device.type, enabled=False):
                if self.kernels is None:
                    keys, visible = k.shape[1], visible_keys(k.shape[1], ranges[..., 0], ranges[..., 1], None)
                    scores = indexer_scores(q, k, weights).masked_fill(~visible, -torch.inf)
                    if self.stage == "sparse":
                        best = scores.detach().topk(min(self.model.config.index_topk, keys), dim=-1)
                        indices = best.indices.int().masked_fill(best.values == -torch.inf, -1)
                        scores = scores.masked_fill(~visible_keys(keys, None, None, indices), -torch.inf)
                    self._log_q[layer] = scores.log_softmax(-1)
                else:
                    self._vectors[layer] = (q, k, weights)
                    if self.stage == "sparse":
                        with torch.no_grad():
                            indices = select(q, k, weights, ranges, self.model.config.index_topk, self.kernels)
            self._indices[layer] = indices
            return indices

        def shared(*_: Any, **__: Any) -> Tensor:
            return self._indices[self.pattern.source_layers[layer]]

        return full if self.pattern[layer] == "F" else shared

    def attend(self, attention: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend in a layer, `[batch, queries, heads, dim]`, and add the divergence of its source's indexer."""
        layer = attention.layer_idx
        key, value, ranges = self._all_keys(key, 2), self._all_keys(value, 2), self._ranges
        source = self.pattern.source_layers[layer]
        indices = self._indices[source] if self.stage == "sparse" else None
        compare = self.loss == "multi" or layer == source
        if self.kernels is not None:
            output, found = attend_and_compare(
                attention,
                query,
                key,
                ranges,
                scale,
                vectors=self._vectors[source],
                indices=indices,
                backend=self.kernels,
                compare=compare,
                mask=self._block_mask,
            )
        else:
            visible = visible_keys(key.shape[2], ranges[:, 0, :, 0], ranges[:, 0, :, 1], indices)
            scores = torch.matmul(query, key.mT) * scale
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
            output = torch.matmul(weights.to(value.dtype), value).transpose(1, 2).contiguous()
            found = self._divergence(layer, weights.detach().mean(1)) if compare else None
        if found is not None:
            found = found / (self._served[source] if self.loss == "multi" else 1)
            if self._found is not None:
                self._found[source].append(found.sum())
        return output

    def _divergence(self, layer: int, p: Tensor) -> Tensor:
        return divergence(p, self._log_q[self.pattern.source_layers[layer]])


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Tensor, scaling: float, **__: Any
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers; see `Distillation.attend`."""
    return module.distillation.attend(module, query, key, value, scaling), None


def _no_mask(batch_size: int, q_length: int, *_: Any, device: torch.device | str = "cpu", **__: Any) -> Tensor:
    """Stand in for a mask: `Distillation` knows what each query sees."""
    return torch.zeros(batch_size, 1, q_length, 2, dtype=torch.int32, device=device)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
