"""Conversion of misses to bytes, time and requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from indexcache_dense.selection import COMPRESSED_KEYS, JOINT, ROUNDED_KEYS, STRIDE, Selection
from indexcache_lab.dense import key_heads
from indexcache_lab.offload.server import KvDtype, Server
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE, FULL, SHARED

PAGE = 64  # slots that HiSparse keeps beside a buffer, for the newest token
QUANTISED = 128  # values that share a scale of 4 bytes


@dataclass(frozen=True, kw_only=True)
class CacheBytes:
    """Bytes of a token in one layer's cache.

    Attributes:
        kv: bytes of keys and values, which are offloaded.
        index: bytes that a selecting layer keeps of every token, on the device.
        item: tokens that are copied together.
        miss: bytes of a missing item: of all key heads, or of one where each chooses for itself.
        piece: contiguous bytes of an item.
        beside: tokens of room beside a buffer.
    """

    kv: int
    index: int
    item: int
    miss: int
    piece: int
    beside: int

    @classmethod
    def of(cls, config: Any, kv_dtype: KvDtype, selection: Selection | None) -> CacheBytes:
        """Return the sizes of a model's cache; `selection` is that of a dense model."""
        return cls.of_dsa(config, kv_dtype) if selection is None else cls.of_dense(config, kv_dtype, selection)

    @classmethod
    def of_dsa(cls, config: Any, kv_dtype: KvDtype) -> CacheBytes:
        """Return the sizes of a DSA model's cache in SGLang 0.5.23 (`calculate_mla_kv_cache_dim`); an item is a token.

        Raises:
            SearchError: if the configuration lacks a size.
        """
        rank, rope, width = (
            getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
        )
        if not rank or not rope or not width:
            raise SearchError("config.json has no kv_lora_rank, qk_rope_head_dim or index_head_dim")
        kv = 2 * (rank + rope) if kv_dtype == "bfloat16" else rank + rank // QUANTISED * 4 + 2 * rope
        return cls(kv=kv, index=width + math.ceil(width / QUANTISED) * 4, item=1, miss=kv, piece=kv, beside=PAGE)

    @classmethod
    def of_dense(cls, config: Any, kv_dtype: KvDtype, selection: Selection) -> CacheBytes:
        """Return a dense model's sizes. Items are pages; what F layers select by stays on the device."""
        heads, dim = key_heads(config)
        width = heads * dim
        means, rounded = 2 * width // STRIDE, width // 2 + 4 * heads
        index = {COMPRESSED_KEYS: means, ROUNDED_KEYS: rounded}.get(selection.score, 0)
        kv = 2 * width * (2 if kv_dtype == "bfloat16" else 1)
        page = selection.page_tokens * kv
        miss = page if selection.heads == JOINT else page // heads
        piece = page // (2 * heads)  # of a head's keys, or values
        return cls(kv=kv, index=index, item=selection.page_tokens, miss=miss, piece=piece, beside=0)

    def on_device(self, pattern: Pattern, size: int, context: int) -> int:
        """Return a request's bytes on the device: `D` layers hold all tokens, others `size`, at most the context."""
        offloaded = len(pattern) - pattern.roles.count(DENSE)
        held = context if size >= context else size + self.beside
        tokens = (len(pattern) - offloaded) * context + offloaded * held
        return tokens * self.kv + len(selecting_layers(pattern)) * context * self.index

    def on_host(self, pattern: Pattern, context: int) -> int:
        """Return a request's bytes in host memory: all tokens of the offloaded layers."""
        return (len(pattern) - pattern.roles.count(DENSE)) * context * self.kv


def selecting_layers(pattern: Pattern) -> tuple[int, ...]:
    """List the layers that select for themselves or others, ascending."""
    shared = {pattern.source_layers[layer] for layer in pattern.shared_layers}
    return tuple(layer for layer, role in enumerate(pattern.roles) if role == FULL or layer in shared)


def stall_ms(pattern: Pattern, misses: Mapping[int, float], item_bytes: int, server: Server) -> float | None:
    """Predict how much longer a decode step takes than without offloading.

    An `F` layer waits for its selection. The same blocks are then copied for the layers that share it, one after the
    other, beside the computation, and each of these waits for its copy. Layers behind a selecting `D` layer wait in the
    same way. All layers take equally long.

    Args:
        pattern: its source layers select.
        misses: items of a step and request, by selecting layer.
        item_bytes: bytes of a missing item.
        server: has bandwidth and time of a step; the result is `None` if one is unknown.
    """
    if server.bandwidth is None or server.step_ms is None:
        return None
    layer_ms, now, arrives = server.step_ms / len(pattern), 0.0, 0.0
    for role, source in zip(pattern.roles, pattern.source_layers, strict=True):
        travel = server.batch * misses.get(source, 0.0) * item_bytes / (server.bandwidth * 1e9) * 1e3
        if role == SHARED:
            arrives += travel
            now = max(now, arrives) + layer_ms
        elif role == DENSE:
            now += layer_ms
            arrives = now
        else:
            arrives = now = now + travel
            now += layer_ms
    return now - server.step_ms


def hisparse_config(top_k: int, size: int, context: int) -> str:
    """Return the value of SGLang's `--hisparse-config`, with host memory for requests of `context` tokens."""
    ratio = max(2, math.ceil(context / (size + PAGE)))
    return json.dumps({"top_k": top_k, "device_buffer_size": size, "host_to_device_ratio": ratio})
