"""The server that a count is for, as `--server` says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from indexcache_search.cli.bounded import TOKENS, Bounds
from indexcache_search.lab.offload.advice import KvDtype


@dataclass(frozen=True, kw_only=True)
class Server:
    """Known properties of the serving machine; see `advice.Machine`.

    Attributes:
        bandwidth: GB/s from host memory to the device; `None` if it is to be measured.
        step_ms: time of a decode step of `batch` requests with all of the cache on the device.
        batch: requests of a decode step.
        memory_gb: device memory for caches.
        context: tokens of a served request; `None` for the length of a sequence.
        kv_dtype: dtype of the served cache.
    """

    bandwidth: Annotated[float, Bounds(1e-3, 1e6)] | None = None
    step_ms: Annotated[float, Bounds(1e-6, 1e9)] | None = None
    batch: Annotated[int, Bounds(1, 1_000_000)] = 1
    memory_gb: Annotated[float, Bounds(1e-6, 1e6)] | None = None
    context: Annotated[int, TOKENS] | None = None
    kv_dtype: KvDtype = "fp8_e4m3"
