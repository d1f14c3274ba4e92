"""Sparse MLA attention and the index-to-slot transforms, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gather_decode(page_table: Tensor, topk_indices: Tensor, result: Tensor | None = None, page_size: int = 1) -> Tensor:
    """Slots of the selected tokens, one request a row.

    Args:
        page_table: `[queries, tokens]` int32, KV slot of each token.
        topk_indices: `[queries, k]` int32 token positions, -1 for none.

    Returns:
        `[queries, k]` int32 slots, -1 for none.
    """
    slots = topk_indices.new_full(topk_indices.shape, -1, dtype=torch.int32)
    chosen = topk_indices[: len(page_table)].long()  # padding rows have no row of the table
    slots[: len(chosen)] = page_table.gather(1, chosen.clamp_min(0)).to(torch.int32).masked_fill(chosen < 0, -1)
    return slots


def gather_prefill(
    page_table: Tensor,
    topk_indices: Tensor,
    extend_lens_cpu: Sequence[int],
    page_size: int = 1,
    output_num_tokens: int | None = None,
    page_table_is_expanded: bool = False,
    cu_seqlens_q: Tensor | None = None,
) -> Tensor:
    """As `gather_decode`, for rows of several tokens a request; rows beyond the last token are -1."""
    tokens = sum(extend_lens_cpu)
    rows = page_table
    if not page_table_is_expanded:
        rows = torch.repeat_interleave(page_table, torch.tensor(list(extend_lens_cpu)), dim=0)
    shape = (output_num_tokens or topk_indices.shape[0], topk_indices.shape[1])
    slots = topk_indices.new_full(shape, -1, dtype=torch.int32)
    slots[:tokens] = gather_decode(rows[:tokens], topk_indices[:tokens])
    return slots


def sparse_attention(
    backend: Any,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    page_table_1: Tensor,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """Attention of `[tokens, heads, dim]` queries over the `[tokens, k]` slots in `page_table_1`, in float32.

    `attn_sink`, `[heads]`, is a score that takes part in the softmax and has no value.
    """
    slots = page_table_1.long()
    kv = kv_cache.reshape(kv_cache.shape[0], -1)[slots.clamp_min(0)].float()
    scores = torch.einsum("thd,tkd->thk", q_all.float(), kv) * sm_scale
    scores = scores.masked_fill((slots < 0).unsqueeze(1), float("-inf"))
    if attn_sink is not None:
        sink = attn_sink.float().view(1, -1, 1).expand(len(scores), -1, 1)
        scores = torch.cat([scores, sink], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : slots.shape[1]]
    return torch.einsum("thk,tkd->thd", probabilities, kv[..., :v_head_dim]).to(q_all.dtype)
