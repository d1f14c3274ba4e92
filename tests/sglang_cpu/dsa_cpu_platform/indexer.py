"""The lightning indexer in float32: no fp8, no Hadamard rotation; index keys in a side buffer of the KV pool.

The buffer is as SGLang's: of each page first the keys, then a scale for each, here 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsa_cpu_platform import recorder

_BUFFERS = "_dsa_cpu_index_keys"


def indexer_forward(
    indexer: Any,
    x: Tensor,
    q_lora: Tensor,
    positions: Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
) -> Tensor | None:
    """Replaces `Indexer.forward_native`.

    Args:
        x: `[tokens, hidden]`.
        q_lora: `[tokens, q_lora_rank]`.
        positions: `[tokens]`.
        return_indices: `False` where only the index keys are wanted.

    Returns:
        `[tokens, index_topk]` int32 positions within each request, -1 for none.
    """
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.layers.cp.utils import is_cp_active
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
    from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

    queries, keys, weights = _project(indexer, x, q_lora, positions)
    if is_cp_active(forward_batch):  # each rank has some of the rows, and all need all keys
        keys = get_cp_strategy().materialize_full_indexer_k_cache(keys, forward_batch)
    cache, page = _index_keys(get_token_to_kv_pool(), layer_id, indexer.head_dim), get_token_to_kv_pool().page_size
    cache[forward_batch.out_cache_loc // page, forward_batch.out_cache_loc % page] = keys
    if not return_indices:
        recorder.record(layer_id, forward_batch, positions, None)
        return None
    metadata = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    selected = torch.full((x.shape[0], indexer.index_topk), -1, dtype=torch.int32)
    if forward_batch.forward_mode.is_extend() and not _of_drafts(forward_batch):
        rows = sum(metadata.get_dsa_extend_len_cpu())
        indexer._get_topk_ragged(
            False, forward_batch, layer_id, queries[:rows], weights[:rows, :, None], metadata, selected[:rows]
        )
    else:
        rows = _rows(forward_batch, metadata.get_page_table_1())
        selected[:rows] = indexer._get_topk_paged(forward_batch, layer_id, queries, weights[..., None], metadata)[:rows]
    recorder.record(layer_id, forward_batch, positions, selected[:rows])
    return maybe_capture_indexer_topk(layer_id, selected)


def _of_drafts(forward_batch: Any) -> bool:
    """Whether each of several tokens of a request has a row of the page table of its own."""
    mode = forward_batch.forward_mode
    return bool(mode.is_target_verify() or mode.is_draft_extend_v2())


def _rows(forward_batch: Any, table: Tensor) -> int:
    """Rows that have a row of the page table: a batch may be padded to the largest of data-parallel attention."""
    return len(table) if _of_drafts(forward_batch) else min(len(table), int(forward_batch.batch_size))


def read_buffer(pool: Any, layer_id: int) -> Tensor:
    """Replaces `Indexer._get_index_k_read_buffer`: `[pages, bytes]`."""
    buffer: Tensor = pool.__dict__[_BUFFERS][layer_id]
    return buffer


def select_paged(
    indexer: Any, forward_batch: Any, layer_id: int, q_fp8: Tensor, weights: Tensor, metadata: Any
) -> Tensor:
    """Replaces `Indexer._get_topk_paged`, for decoding and draft tokens; arguments as of `select_ragged`."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    pool = get_token_to_kv_pool()
    cache, table = _index_keys(pool, layer_id, indexer.head_dim), metadata.get_page_table_1().long()
    rows = _rows(forward_batch, table)
    scores = [
        _scores(
            q_fp8[row, None],
            weights[row, None, :, 0],
            cache[table[row] // pool.page_size, table[row] % pool.page_size],
            indexer.softmax_scale,
        )
        for row in range(rows)
    ]
    selected = torch.full((len(q_fp8), indexer.index_topk), -1, dtype=torch.int32)
    selected[:rows] = metadata.topk_transform(torch.cat(scores), indexer.index_topk)
    return selected


def select_ragged(
    indexer: Any,
    enable_dual_stream: bool,
    forward_batch: Any,
    layer_id: int,
    q_fp8: Tensor,
    weights: Tensor,
    metadata: Any,
    topk_result: Tensor | None = None,
) -> Tensor:
    """Replaces `Indexer._get_topk_ragged`: the keys of all requests stand behind each other, as there.

    Args:
        q_fp8: index queries `[rows, heads, dim]`, in float32.
        weights: `[rows, heads, 1]`.
    """
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    pool = get_token_to_kv_pool()
    cache = _index_keys(pool, layer_id, indexer.head_dim)
    lengths, table = metadata.get_indexer_seq_len_cpu().tolist(), metadata.get_page_table_1()
    slots = torch.cat([row[:length].long() for row, length in zip(table, lengths, strict=True)])
    keys = cache[slots // pool.page_size, slots % pool.page_size]
    starts, ends = metadata.get_indexer_kvcache_range()
    column = torch.arange(len(keys))
    scores = _scores(q_fp8, weights[..., 0], keys, indexer.softmax_scale)
    scores[(column < starts[:, None]) | (column >= ends[:, None])] = float("nan")  # nobody cleans them on a GPU either
    assert len(scores) == len(metadata.get_seqlens_expanded())
    selected: Tensor = metadata.topk_transform(scores, indexer.index_topk, ks=starts)
    if topk_result is None:
        return selected
    topk_result[: len(selected)] = selected
    return topk_result


def _scores(queries: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """`[rows, keys]`."""
    heads = torch.relu(torch.einsum("thd,kd->thk", queries, keys))
    return torch.einsum("thk,th->tk", heads * scale, weights)


def _project(indexer: Any, x: Tensor, q_lora: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[tokens, heads, dim]`, keys `[tokens, dim]`, head weights `[tokens, heads]`, all float32."""
    heads, rope = indexer.n_heads, indexer.rope_head_dim
    q = indexer.wq_b(q_lora)[0].view(-1, heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(x)[0])
    q_rope, k_rope = indexer.rotary_emb(positions, q[..., :rope].contiguous(), k[..., :rope].unsqueeze(1).contiguous())
    q = torch.cat([q_rope.reshape(-1, heads, rope), q[..., rope:]], dim=-1)
    k = torch.cat([k_rope.reshape(-1, rope), k[..., rope:]], dim=-1)
    weights = F.linear(x.float(), indexer.weights_proj.weight.float()) * heads**-0.5
    return q.float(), k.float(), weights


def transferred(cache: Any) -> tuple[list[int], list[int], list[int]]:
    """Replaces `IndexKeyCache.state_buf_infos`, for transfers: the address, bytes and bytes a page of each layer."""
    pool = cache.pool
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    buffers = [_buffer(pool, layer, pool.index_head_dim) for layer in layers]
    return (
        [item.data_ptr() for item in buffers],
        [item.nbytes for item in buffers],
        [item[0].nbytes for item in buffers],
    )


def _index_keys(pool: Any, layer_id: int, head_dim: int) -> Tensor:
    """`[pages, page, dim]` in the buffer of a layer."""
    page = pool.page_size
    return (
        _buffer(pool, layer_id, head_dim)[:, : 4 * page * head_dim].view(torch.float32).unflatten(1, (page, head_dim))
    )


def _buffer(pool: Any, layer_id: int, head_dim: int) -> Tensor:
    """`[pages, bytes]`."""
    buffers: dict[int, Tensor] = pool.__dict__.setdefault(_BUFFERS, {})
    page = pool.page_size
    if layer_id not in buffers:
        slots = max(pool.size, pool.index_buf_size)  # of all ranks of decode context parallelism
        buffers[layer_id] = torch.zeros(slots // page + 2, page * (4 * head_dim + 4), dtype=torch.uint8)
        buffers[layer_id][:, 4 * page * head_dim :].view(torch.float32).fill_(1.0)
    return buffers[layer_id]
