"""The loss of indexers in Megatron-Core's DeepSeek Sparse Attention, for patterns, packed sequences and split ones.

    loss = IndexerLoss(model, pattern, "sparse")  # before the model is wrapped for data parallelism
    with loss.attached():
        ...  # Megatron's own training loop

Written against the source of megatron-core 0.16.1 (core/transformer/experimental_attention_variant/dsa.py), and tested
with a stand-in for it, not on a cluster.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from indexcache_kernels.backends import Backend
from indexcache_kernels.indexer_topk import indexer_topk
from indexcache_kernels.patching import replaced
from indexcache_search.errors import NonFiniteLossError, SearchError
from indexcache_train.distill.settings import Loss, Stage
from indexcache_train.kernels.indexer_kl import visible_keys
from indexcache_train.kernels.indexer_loss import LayerAttention, gather_keys, indexer_loss, packed_ranges
from sglang_indexcache import Pattern

_ATTENTION, _SCALER, _LOG = "DSAttention", "DSAIndexerLossAutoScaler", "DSAIndexerLossLoggingHelper"
_FORWARD = ("query", "key", "value", "attention_mask", "x", "qr", "attn_mask_type", "attention_bias")
_PARTS = {
    "forward_with_scores": ("x", "qr", "mask", "packed_seq_params"),
    "_compute_index_scores": ("q", "weights", "k"),
}


class IndexerLoss:
    """Megatron models with DSA whose S layers reuse selections, and whose indexers learn from all layers they serve.

    In place of Megatron's own indexer loss, with its coefficient (`dsa_indexer_loss_coeff`): a layer attaches its share
    of Equation 1, the mean over this rank's queries, to its output, by Megatron's own scaler and log. Heads that are
    split over tensor-parallel ranks count like layers: the gradient is that of their mean.

    Args:
        model: built by Megatron-Core, not wrapped yet. Its parameters become trainable as the stage asks.
        pattern: F and S of all layers of the model, in all stages of a pipeline.
        stage: `warmup`: attention is dense, and only the indexers of F layers train; `sparse`: everything does.
        loss: `multi` is Equation 1; `own` is each indexer against its own layer only.
        group: the context-parallel group, of which each rank has the chunks r and 2 ranks - 1 - r of every batch, as
            Megatron splits them; None without. The TransformerConfig of 0.16.1 refuses that for DSA.
        backend: see `indexcache_train.kernels.indexer_kl`.

    Raises:
        SearchError: if the model has no DSA, another version calls its parts otherwise, layers are computed again for
            their gradients, or the source of a layer is in another stage of the pipeline.
        PatternError: if the pattern does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        pattern: Pattern,
        stage: Stage,
        loss: Loss = "multi",
        group: Any = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        found: list[Any] = [module for module in model.modules() if type(module).__name__ == _ATTENTION]
        if not found:
            raise SearchError(f"the model has no {_ATTENTION}, expected experimental_attention_variant='dsa'")
        self._layers: dict[int, Any] = {module.layer_number - 1: module for module in found}
        self._parts = sys.modules[type(found[0]).__module__]
        config: Any = found[0].config
        _check_parts(found[0], self._parts, config)
        pattern.check_plain("is not trained for yet")
        pattern.check_fits(config.num_layers, [])
        for layer in self._layers:
            if pattern.source_layers[layer] not in self._layers:
                raise SearchError(
                    f"layer {layer} reuses the selection of layer {pattern.source_layers[layer]}, which is in another"
                    " stage of the pipeline; expected an F layer first in each stage"
                )
        self.pattern, self.stage, self.loss = pattern, stage, loss
        self._group, self._backend = group, backend
        self._coefficient: float = config.dsa_indexer_loss_coeff or 0.0
        self._vectors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._indices: dict[int, Tensor] = {}
        for parameter in model.parameters():
            parameter.requires_grad_(stage == "sparse")
        for layer, attention in self._layers.items():
            attention.indexer.requires_grad_(pattern[layer] == "F")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replace the forward pass of each sparse attention inside the `with` block, and restore it afterwards."""
        forward = [(item, "forward", partial(self._forward, layer, item)) for layer, item in self._layers.items()]
        try:
            with replaced(*forward):
                yield
        finally:
            self._vectors.clear()
            self._indices.clear()

    def _forward(  # noqa: PLR0917
        self,
        layer: int,
        attention: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend as `DSAttention.forward`: causal, `[length, batch, heads, dim]`, or packed without a batch."""
        if packed_seq_params is not None and self._group is not None:
            raise SearchError(
                "sequences are packed and split over ranks, where Megatron's indexer rotates by other positions;"
                " expected one of them"
            )
        if attention_bias is not None or (attn_mask_type is not None and attn_mask_type.name != "causal"):
            raise SearchError("attention has a bias or another mask than a causal one, expected neither")
        if packed_seq_params is not None and query.ndim == 3:
            query, key, value = (item.unsqueeze(1) for item in (query, key, value))
        length, batch = query.shape[:2]
        x, qr = (item.reshape(item.shape[0], batch, -1) for item in (x, qr))
        positions = self._positions(length, query.device)
        key, value = (self._all_rows(item, positions) for item in (key, value))
        ranges = _ranges(packed_seq_params, key.shape[0], batch, positions)
        source = self.pattern.source_layers[layer]
        if layer == source:
            self._vectors[layer] = self._index(attention.indexer, x.detach(), qr.detach(), positions)
            if self.stage == "sparse":
                self._indices[layer] = self._select(layer, ranges, attention.indexer.index_topk)
        indices = self._indices[source] if self.stage == "sparse" else None
        q, k, v = (_rows(item) for item in (query, key, value))
        scores = torch.einsum("thd,lhd->htl", *(item.to(_wide(q)) for item in (q, k))) * attention.softmax_scale
        scores = scores.masked_fill(~visible_keys(len(k), *ranges, indices), -torch.inf)
        output: Tensor = torch.einsum("htl,lhd->thd", scores.softmax(-1).to(v.dtype), v)
        output = output.reshape(batch, length, -1).transpose(0, 1).contiguous()
        if not attention.training or not torch.is_grad_enabled() or (self.loss == "own" and layer != source):
            return output
        lse = scores.detach().logsumexp(-1).T.float().contiguous()
        looks = LayerAttention(q, k, attention.softmax_scale, lse)
        served = self.pattern.source_layers.count(source) if self.loss == "multi" else 1
        total = indexer_loss([looks], *self._vectors[source], ranges, indices, self._backend)
        total = total * (self._coefficient / (served * len(q)))
        if not torch.isfinite(total):
            raise NonFiniteLossError(f"layer {layer}: indexer loss {total.item()}, expected finite numbers")
        getattr(self._parts, _LOG).save_loss_to_tracker(
            loss=total, layer_number=attention.layer_number, num_layers=attention.config.num_layers
        )
        attached: Tensor = getattr(self._parts, _SCALER).apply(output, total)
        return attached

    def _positions(self, length: int, device: torch.device) -> Tensor | None:
        """Return where this rank's tokens stand in the sequence, by Megatron's chunks; None if it has all."""
        if self._group is None:
            return None
        rank, chunks = dist.get_rank(self._group), 2 * dist.get_world_size(self._group)
        own = torch.arange(length * chunks // 2, device=device).chunk(chunks)
        if length % 2:
            raise SearchError(f"a rank has {length} tokens of a sequence, expected two chunks of the same length")
        return torch.cat([own[rank], own[chunks - 1 - rank]])

    def _all_rows(self, rows: Tensor, positions: Tensor | None) -> Tensor:
        return rows if positions is None else gather_keys(rows, positions, self._group)

    def _index(self, indexer: Any, x: Tensor, qr: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Run an indexer up to its scores: queries `[T, I, C]`, keys of all ranks `[L, C]`, weights `[T, I]`."""
        seen: list[Tensor] = []

        def keep(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
            seen.extend((q, k, weights))
            return q.new_zeros(1).expand(q.shape[1], q.shape[0], k.shape[0])  # nothing that Megatron selects is used

        with replaced((indexer, "_compute_index_scores", keep)):
            indexer.forward_with_scores(x, qr)
        q, k, weights = seen
        tensor_parallel = indexer.pg_collection.tp
        if tensor_parallel is not None and tensor_parallel.size() > 1:
            q, k, weights = (_MeanGradient.apply(item, tensor_parallel) for item in seen)  # type: ignore[no-untyped-call]
        return _rows(q), _rows(self._all_rows(k, positions)), _rows(weights).to(_wide(weights))

    @torch.no_grad()
    def _select(self, layer: int, ranges: tuple[Tensor, Tensor], topk: int) -> Tensor:
        q, k, weights = (item.float() if item.dtype == torch.float64 else item for item in self._vectors[layer])
        starts, ends = ranges
        topk = min(topk, int((ends - starts).max()))
        return indexer_topk(q, k, weights, starts=starts, ends=ends, topk=topk, backend=self._backend)


class _MeanGradient(torch.autograd.Function):
    """Average gradients over ranks that each know the attention of some heads: those of the mean over all heads."""

    @staticmethod
    def forward(ctx: Any, item: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return item.view_as(item)

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, None]:
        total = change.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total / dist.get_world_size(ctx.group), None


def _rows(item: Tensor) -> Tensor:
    """Put the sequences of a batch one behind the other: `[length, batch, ...]` to `[batch x length, ...]`."""
    return item.transpose(0, 1).flatten(0, 1)


def _wide(item: Tensor) -> torch.dtype:
    return torch.promote_types(item.dtype, torch.float32)


def _ranges(packed: Any, keys: int, batch: int, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what each query sees, in rows of `batch` sequences of `keys` tokens."""
    if packed is None:
        cumulative, own = torch.arange(batch + 1) * keys, positions
        if positions is not None:
            own = (torch.arange(batch, device=positions.device)[:, None] * keys + positions).flatten()
            cumulative = cumulative.to(positions.device)
        return packed_ranges(cumulative, own)
    padded = packed.cu_seqlens_q_padded
    return packed_ranges((packed.cu_seqlens_q if padded is None else padded).long(), positions)


def _check_parts(attention: Any, parts: Any, config: Any) -> None:
    """Refuse another version of Megatron-Core whose parts are called otherwise, and layers that run twice.

    Raises:
        SearchError: with the first difference.
    """

    def takes(function: Callable[..., Any], names: Sequence[str]) -> None:
        found = tuple(inspect.signature(function).parameters)
        if found[: len(names)] != tuple(names):
            raise SearchError(
                f"{function.__qualname__} of Megatron-Core takes {', '.join(found)}; expected {', '.join(names)}, as in"
                " 0.16"
            )

    takes(attention.forward, _FORWARD)
    for name, parameters in _PARTS.items():
        method = getattr(attention.indexer, name, None)
        if method is None:
            raise SearchError(f"the indexer of Megatron-Core has no {name}, expected it, as in 0.16")
        takes(method, parameters)
    for name in (_SCALER, _LOG):
        if not hasattr(parts, name):
            raise SearchError(f"Megatron-Core has no {name}, expected it, as in 0.16")
    again = config.recompute_granularity
    if again == "full" or (again == "selective" and "core_attn" in (config.recompute_modules or ())):
        raise SearchError(
            f"recompute_granularity is {again}, so layers would run twice and lose their sources; expected selective"
            " without core_attn, or none"
        )
