"""Decoding over selected blocks with transformers on a CPU: F layers select, S layers reuse, D layers see all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from indexcache_dense.hf.pages import check_layers
from indexcache_dense.hf.patch_attention import AttentionCall, attending
from indexcache_lab.kernels.block_attention import BlockBackend, block_attention
from indexcache_search.errors import SearchError
from sglang_indexcache.pattern import DENSE, FULL, SHARED

SINKS, RECENT = 1, 2  # first and last blocks, which are always selected


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How blocks are selected.

    Attributes:
        roles: a letter a layer: `F` selects blocks, `S` reuses those of the nearest `F` before it, `D` sees all.
        share: share of the cache's blocks to select.
        tokens: tokens of a block, counted from position 0.

    Raises:
        SearchError: if a value is out of range.
    """

    roles: str
    share: float
    tokens: int = 64

    def __post_init__(self) -> None:
        before = self.roles.partition(SHARED)[0]
        if not self.roles or set(self.roles) - {DENSE, FULL, SHARED} or (before != self.roles and FULL not in before):
            raise SearchError(f"roles are {self.roles!r}, expected D, F and S, with an F before the first S")
        if not 0 < self.share <= 1 or self.tokens < 1:
            raise SearchError(f"{self} can't be chosen; expected a share up to 1")

    def count(self, blocks: int) -> int:
        """Return the number of blocks to select of `blocks`."""
        return min(blocks, max(math.ceil(blocks * self.share), SINKS + RECENT))


@dataclass
class _DecodingState:
    """State of decoding between layers and steps.

    Attributes:
        sums: by selecting layer, `[batch, blocks, G * D]`: sums of the keys of each block.
        counted: by layer, tokens in these sums.
        chosen: the last selection, `[batch, N]`, int32.
    """

    blocks: Blocks
    cache: StaticCache
    backend: BlockBackend
    sums: dict[int, Tensor] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    chosen: Tensor | None = None


@contextmanager
def apply_block_decoding(
    model: Any, blocks: Blocks, cache: StaticCache, backend: BlockBackend = "auto"
) -> Iterator[None]:
    """Decode with `model` over selected blocks inside the `with` block; prompts are read as usual.

    A block's score is the product of the query, summed over its heads, and the block's mean key. All heads share one
    selection. With share 1 the outputs are those of attention to everything up to rounding.

    Args:
        model: one of the family `dense_gqa`, on a CPU.
        blocks: how they are selected.
        cache: the model's cache, see `cache_argument`; sequences of one length, without padding.
        backend: see `indexcache_lab.kernels.block_attention`.

    Raises:
        SearchError: if the roles or the model's layers don't fit.
        RuntimeError: if blocks are already applied.
    """
    layers = model.config.num_hidden_layers
    if len(blocks.roles) != layers:
        raise SearchError(f"there are {len(blocks.roles)} roles, the model has {layers} layers")
    check_layers(model)
    state = _DecodingState(blocks, cache, backend)
    with attending(model, "indexcache_blocks", partial(_attention, state), sdpa_mask):
        yield


def _attention(state: _DecodingState, call: AttentionCall) -> Tensor:
    layer, query, key = call.layer, call.query, call.key
    if query.shape[2] > 1 or state.blocks.roles[layer] == DENSE:
        output, _ = call.by(sdpa_attention_forward)(query, key, call.value, call.mask)
        return output
    length = int(state.cache.layers[layer].get_seq_length())
    if state.blocks.roles[layer] == FULL:
        state.chosen = _choose(state, layer, query, key, length)
    assert state.chosen is not None
    lengths = torch.full((len(query),), length, dtype=torch.int32)
    attended = block_attention(
        query[:, :, 0],
        key,
        call.value,
        state.chosen,
        scale=call.scaling,
        block_tokens=state.blocks.tokens,
        lengths=lengths,
        backend=state.backend,
    )
    return attended[:, None]


def _choose(state: _DecodingState, layer: int, query: Tensor, key: Tensor, length: int) -> Tensor:
    """Select the blocks that the newest token attends to, `[batch, N]`, int32."""
    blocks, (batch, kv_heads, _, dim) = state.blocks, key.shape
    size, number = blocks.tokens, -(-length // blocks.tokens)
    if state.counted.get(layer) != length - 1:
        seen = key[:, :, :length].float().transpose(1, 2).flatten(2)  # [batch, tokens, G * D]
        room = -(-key.shape[2] // size)
        padded = F.pad(seen, (0, 0, 0, room * size - length))
        state.sums[layer] = padded.view(batch, room, size, -1).sum(2)
    else:
        state.sums[layer][:, number - 1] += key[:, :, length - 1].float().flatten(1)
    state.counted[layer] = length
    grouped = query[:, :, 0].float().view(batch, kv_heads, -1, dim).sum(2).flatten(1)  # [batch, G * D]
    scores = (state.sums[layer][:, :number] @ grouped[:, :, None])[:, :, 0]
    scores[:, :SINKS] = torch.inf
    scores[:, max(0, number - RECENT) :] = torch.inf
    return scores.topk(blocks.count(number), dim=1, sorted=False).indices.int()
