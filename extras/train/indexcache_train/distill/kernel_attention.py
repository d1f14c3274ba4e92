"""Attention and divergences of a layer by the project's kernels, without `[queries, keys]` tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from indexcache_kernels.backends import Backend
from indexcache_kernels.transformers import ROWS, absorb, attend_latent, first_keys, halves
from indexcache_train.kernels.attention_gradients import sparse_attention
from indexcache_train.kernels.indexer_kl import indexer_kl

Vectors = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and weights of an indexer, as of `indexcache_kernels.transformers.index_vectors`."""


def computed_in(tensor: Tensor) -> Tensor:
    """Cast `tensor` to the dtype of autocast, since a layer norm or a rotary table may have made it wider."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def attend_and_compare(
    attention: Any,
    query: Tensor,
    key: Tensor,
    ranges: Tensor,
    scale: float,
    *,
    vectors: Vectors,
    indices: Tensor | None,
    backend: Backend,
    compare: bool,
    mask: BlockMask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend, and measure the indexer's divergence from the attention.

    Args:
        attention: the layer's attention module.
        query: `[batch, heads, queries, dim]`.
        key: `[batch, 1, keys, latent + rope]`.
        ranges: first keys and ends of the queries, `[batch, 1, queries, 2]`.
        scale: factor of the products of queries and keys.
        vectors: the indexer's queries, keys and weights.
        indices: `[batch, queries, k]`, the keys to attend to and compare over. None means all earlier keys, in which
            case the attention has no gradient.
        backend: backend of the kernels.
        compare: also measure the divergence.
        mask: `range_mask` of `ranges`, where some first keys are not 0 and `indices` is None.

    Returns:
        `[batch, queries, heads, value]`, and the sum of the queries' divergences, with gradients to the indexer only.
    """
    query, key = computed_in(query), computed_in(key)
    index_q, index_k, weights = (item.flatten(0, 1) for item in vectors)
    starts, ends = (ranges[:, 0] + first_keys(key[:, 0])).flatten(0, 1).unbind(dim=1)

    def divergence(  # noqa: PLR0917
        part: slice, index: Vectors, absorbed: Tensor, keys: Tensor, lse: Tensor, chosen: Tensor | None
    ) -> Tensor:
        given = (absorbed.detach(), keys.detach(), lse.detach(), scale)
        return indexer_kl(*given, *index, starts[part].contiguous(), ends[part].contiguous(), chosen, backend)[0]

    if indices is not None:
        sums: list[Tensor] = []

        def attend(absorbed: Tensor, keys: Tensor, v_dim: int, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            latent, lse = sparse_attention(absorbed, keys, v_dim, chosen, scale, backend)
            if compare:
                part = slice(len(sums) * ROWS, len(sums) * ROWS + len(absorbed))
                sums.append(divergence(part, (index_q[part], index_k, weights[part]), absorbed, keys, lse, chosen))
            return latent, lse

        output = attend_latent(attention, query, key, indices, scale, attend)
        return output, torch.stack(sums).sum() if sums else None
    with torch.no_grad():
        output, lse = dense_attention(attention, query, key, scale, mask)
        if not compare:
            return output, None
        queries, lse = query.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        keys, (w_k, _) = key[:, 0].flatten(0, 1)[:, None], halves(attention)

    def block(part: slice, *index: Tensor) -> Tensor:
        with torch.no_grad():
            absorbed = absorb(queries[part], w_k, attention.qk_nope_head_dim)
        with torch.autocast(query.device.type, enabled=False):
            return divergence(part, index, absorbed, keys, lse[part], None)  # type: ignore[arg-type]

    total: Tensor = _SumOfBlocks.apply(block, index_q, index_k, weights)  # type: ignore[no-untyped-call]
    return output, total


class _SumOfBlocks(torch.autograd.Function):
    """A sum over blocks of queries. Gradients are computed in the forward pass, so that nothing of a block is kept.

    Otherwise every layer would keep its absorbed queries until the backward pass: 29 GB for 12 layers of 64 heads and
    32,768 tokens.
    """

    @staticmethod
    def forward(ctx: Any, block: Callable[..., Tensor], index_q: Tensor, index_k: Tensor, weights: Tensor) -> Tensor:
        d_q, d_weights = torch.empty_like(index_q), torch.empty_like(weights)
        d_k = torch.zeros_like(index_k, dtype=torch.promote_types(index_k.dtype, torch.float32))
        sums = []
        for start in range(0, len(index_q), ROWS):
            part = slice(start, start + ROWS)
            with torch.enable_grad():
                leaves = [item.detach().requires_grad_() for item in (index_q[part], index_k, weights[part])]
                value = block(part, *leaves)
                d_q[part], change, d_weights[part] = torch.autograd.grad(value, leaves)
            d_k += change
            sums.append(value.detach())
        ctx.save_for_backward(d_q, d_k.to(index_k.dtype), d_weights)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(item * change for item in ctx.saved_tensors)


def dense_attention(
    attention: Any, query: Tensor, key: Tensor, scale: float, mask: BlockMask | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with all heads to all earlier keys.

    Args:
        attention: the module, which expands latents to keys and values.
        query: `[batch, heads, queries, dim]`.
        key: `[batch, 1, keys, latent + rope]`, as many keys as queries.
        scale: factor of the products of queries and keys.
        mask: of the earlier keys that queries see; None for all.

    Returns:
        `[batch, queries, heads, value]`, and the logarithms of the softmax's denominators, `[batch, heads, queries]`,
        float32.
    """
    query, key = query.detach(), key.detach()
    latent, rope = torch.split(key, [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    keys, values = type(attention).expand_kv(attention, latent, rope)
    run = _compiled() if query.device.type == "cuda" else flex_attention
    mask = _causal(query.shape[2], query.device) if mask is None else mask
    output, auxiliary = run(
        query,
        keys.to(query.dtype),
        values.to(query.dtype),
        block_mask=mask,
        scale=scale,
        return_aux=AuxRequest(lse=True),
    )
    return output.transpose(1, 2).contiguous(), auxiliary.lse.float()


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


@cache
def _causal(length: int, device: torch.device) -> BlockMask:
    def earlier(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return _block_mask(earlier, None, length, device)


def range_mask(ranges: Tensor) -> BlockMask:
    """Return the mask of queries that see keys from a first one to their own: `ranges` is `[batch, 1, queries, 2]`."""
    starts = ranges[:, 0, :, 0]

    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key >= starts[batch, query])

    return _block_mask(within, len(starts), starts.shape[1], starts.device)


def _block_mask(seen: Callable[..., Tensor], batch: int | None, length: int, device: torch.device) -> BlockMask:
    # Compiling avoids a [queries, keys] tensor, 10 GiB at 32,768 tokens.
    compiled = device.type == "cuda"
    return create_block_mask(seen, batch, None, length, length, device=str(device), _compile=compiled)
