"""The server that a count is for, as `--server` says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from indexcache_search.cli.bounded import TOKENS, Bounds
from indexcache_search.lab.offload.advice import KvDtype


@dataclass(frozen=True, kw_only=True)
class Server:
    """What is known of the machine that serves; see `advice.Machine`.

    Attributes:
        bandwidth: GB/s from host memory to the device; `None` where it is to be measured.
        step_ms: what a decode step of `batch` requests takes with all of the cache on the device.
        batch: requests of a decode step.
        memory_gb: device memory for caches.
        context: tokens of a served request; `None` for those of a sequence.
        kv_dtype: of the served cache.
    """

    bandwidth: Annotated[float, Bounds(1e-3, 1e6)] | None = None
    step_ms: Annotated[float, Bounds(1e-6, 1e9)] | None = None
    batch: Annotated[int, Bounds(1, 1_000_000)] = 1
    memory_gb: Annotated[float, Bounds(1e-6, 1e6)] | None = None
    context: Annotated[int, TOKENS] | None = None
    kv_dtype: KvDtype = "fp8_e4m3"
