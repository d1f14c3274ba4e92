"""The loss that trains an indexer for all the layers that it serves, in whatever trains a model.

Every function takes rows of tokens, sequences one behind the other, as `indexer_kl` does: `packed_ranges` says what
queries of packed sequences see, `padded_ranges` those of a padded batch. With context parallelism a rank has some of
the queries, and `gather_keys` gives it the keys of all. Losses are sums over the rank's queries: divide them by the
number of all queries, and add up the ranks' gradients of weights, as for any other loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from indexcache_kernels.backends import Backend
from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.indexer_topk import causal_ranges
from indexcache_train.kernels.indexer_kl import indexer_kl

Ranges = tuple[Tensor, Tensor]
"""First key and one past the last of each query, two tensors `[T]`, int32."""


@dataclass(frozen=True)
class LayerAttention:
    """Where the attention of a layer looks; none of it gets a gradient.

    Attributes:
        q: `[T, H, D]`, queries of this rank.
        k: `[L, G, D]`, keys of all ranks; G divides H.
        scale: what products of `q` and `k` are multiplied by.
        lse: `[T, H]`, float32, see `indexer_kl`; the backend `naive` takes None.
    """

    q: Tensor
    k: Tensor
    scale: float
    lse: Tensor | None = None


def indexer_loss(
    layers: Sequence[LayerAttention],
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    ranges: Ranges,
    indices: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the sum over queries of the mean over `layers` of KL(attention || indexer): IndexCache, Equation 1.

    Layers that are at hand one after the other may be given alone: their losses, each divided by the number of layers,
    add up to the same.

    Args:
        layers: that use the indexer's selection, its own first; one of them is DeepSeek-V3.2's loss.
        index_q: `[T, I, C]`, in the dtype of the attention.
        index_k: `[L, C]`, likewise.
        index_weights: `[T, I]`, float32 (float64 where that is), with all scales.
        ranges: what each query sees; one that sees nothing (padding) adds nothing.
        indices: `[T, K]`, int32, -1 for none: the keys selected by `indexer_topk` in the sparse stage. None compares
            over all keys that a query sees, as in the warm-up.
        backend: see `indexer_kl`.

    Returns:
        A scalar, in nats; its gradient reaches `index_q`, `index_k` and `index_weights`.

    Raises:
        KernelInputError: if there is no layer, or shapes or dtypes don't fit together.
    """
    if not layers:
        raise KernelInputError("layers is empty, expected the layers that the indexer serves")
    sums = [
        indexer_kl(
            layer.q.detach(),
            layer.k.detach(),
            None if layer.lse is None else layer.lse.detach(),
            layer.scale,
            *(index_q, index_k, index_weights),
            *ranges,
            indices,
            backend,
        )[0]
        for layer in layers
    ]
    return torch.stack(sums).mean()


def packed_ranges(cu_seqlens: Tensor, positions: Tensor | None = None) -> Ranges:
    """Return what the queries of packed sequences see: their own sequence, up to themselves.

    Args:
        cu_seqlens: `[sequences + 1]`, where sequences begin, and the end of the last.
        positions: `[T]`, this rank's tokens among all; None for all.
    """
    starts, ends = causal_ranges(cu_seqlens)
    return (starts, ends) if positions is None else (starts[positions], ends[positions])


def padded_ranges(mask: Tensor) -> Ranges:
    """Return what the queries of a padded batch see, its rows one behind the other; padding sees nothing.

    Args:
        mask: `[sequences, length]`, 1 or True for tokens, which have no gap between them.

    Raises:
        KernelInputError: if they have.
    """
    seen = mask.bool()
    places = torch.arange(seen.shape[1], device=mask.device)
    first, count = seen.int().argmax(1, keepdim=True), seen.sum(1, keepdim=True)
    if not torch.equal(seen, (places >= first) & (places < first + count)):
        raise KernelInputError("the mask has gaps, expected padding on one side or both")
    begins = torch.arange(len(seen), device=mask.device)[:, None] * seen.shape[1]
    ends = torch.where(seen, begins + places + 1, 0)
    return torch.where(seen, begins + first, 0).flatten().int(), ends.flatten().int()


def gather_keys(keys: Tensor, positions: Tensor, group: Any = None) -> Tensor:
    """Gather the keys of all ranks, `[L, ...]`, in the order of the tokens; each rank gets the gradient of its own.

    Args:
        keys: `[T, ...]`, of this rank's tokens; all ranks have as many.
        positions: `[T]`, these tokens among all: `0 .. L - 1`, each on one rank.
        group: the ranks among which the sequence is split; None for all.

    Raises:
        KernelInputError: if the ranks' positions are not those of one sequence.
    """
    order = torch.cat(_all_gather(positions.long(), group))
    if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        raise KernelInputError(f"positions of all ranks are not 0 to {len(order) - 1}, each once")
    gathered: Tensor = _GatherKeys.apply(keys, positions.long(), order, group)  # type: ignore[no-untyped-call]
    return gathered


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, positions: Tensor, order: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.group = group
        rows = torch.cat(_all_gather(keys, group))
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        total = change.to(torch.promote_types(change.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=ctx.group)  # not a reduce-scatter, since ranks' tokens need not be neighbours
        return total[positions].to(change.dtype), None, None, None


def _all_gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Return the tensors of all ranks, which have one shape."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found
