"""From misses to bytes, time and requests."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern

PAGE = 64  # slots that HiSparse keeps beside a buffer, for the newest token
QUANTISED = 128  # values that share a scale of 4 bytes
KvDtype = Literal["bfloat16", "fp8_e4m3"]


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a token in one layer's cache, as SGLang 0.5.23 lays it out (`calculate_mla_kv_cache_dim`).

    Attributes:
        kv: what is offloaded.
        index: keys of an indexer, which stay on the device; layers that share have none.
    """

    kv: int
    index: int

    @classmethod
    def of(cls, config: Any, kv_dtype: KvDtype) -> CacheBytes:
        """Of a DSA model's configuration.

        Raises:
            SearchError: if a size is missing.
        """
        rank, rope, width = (
            getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
        )
        if not rank or not rope or not width:
            raise SearchError("config.json has no kv_lora_rank, qk_rope_head_dim or index_head_dim")
        kv = 2 * (rank + rope) if kv_dtype == "bfloat16" else rank + rank // QUANTISED * 4 + 2 * rope
        return cls(kv, width + math.ceil(width / QUANTISED) * 4)

    def on_device(self, pattern: Pattern, size: int, context: int) -> int:
        """Of one request with `size` tokens of each layer there; all of them where `size` covers the context."""
        held = context if size >= context else size + PAGE
        return len(pattern) * held * self.kv + len(pattern.full_layers) * context * self.index

    def on_host(self, pattern: Pattern, context: int) -> int:
        """Of one request, all of its tokens."""
        return len(pattern) * context * self.kv


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a prediction needs to know; what is `None` is not predicted.

    Attributes:
        bandwidth: bytes a second from host memory to the device.
        step_ms: of a decode step of `batch` requests with all of the cache on the device.
        batch: requests of a step.
        memory: bytes of device memory for caches.
        context: tokens of a request.
    """

    bandwidth: float | None
    step_ms: float | None
    batch: int
    memory: float | None
    context: int


def stall_ms(pattern: Pattern, misses: Sequence[float], kv_bytes: int, machine: Machine) -> float | None:
    """What a decode step takes longer than without offloading.

    A layer that chooses waits for its own tokens. Then those of the layers that share its choice travel one layer after
    the other, beside the computation, and each of these waits for what has not come yet. Layers take equally long.

    Args:
        pattern: who chooses.
        misses: tokens of a step and request, by layer that chooses.
        kv_bytes: of a token.
        machine: bandwidth and time of a step; `None` if one is not known.
    """
    if machine.bandwidth is None or machine.step_ms is None:
        return None
    layer, now = machine.step_ms / len(pattern), 0.0
    ends = [*pattern.full_layers, len(pattern)]
    for missed, (first, end) in zip(misses, itertools.pairwise(ends), strict=True):
        travel = machine.batch * missed * kv_bytes / machine.bandwidth * 1e3
        now += travel
        arrives = now
        now += layer
        for _ in range(first + 1, end):
            arrives += travel
            now = max(now, arrives) + layer
    return now - machine.step_ms


def hisparse_config(top_k: int, size: int, context: int) -> str:
    """The value of SGLang's `--hisparse-config`: host memory for requests of `context` tokens beside the buffers."""
    ratio = max(2, math.ceil(context / (size + PAGE)))
    return json.dumps({"top_k": top_k, "device_buffer_size": size, "host_to_device_ratio": ratio})
