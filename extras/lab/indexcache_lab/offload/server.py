"""The server that a count is for, as `--server` describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from indexcache_search.cli.bounded import TOKENS, Bounds

KvDtype = Literal["bfloat16", "fp8_e4m3"]


@dataclass(frozen=True, kw_only=True)
class Server:
    """Known properties of the serving machine; quantities that depend on `None` are not predicted.

    Attributes:
        bandwidth: GB/s from host memory to the device.
        step_ms: time of a decode step of `batch` requests with all of the cache on the device.
        batch: requests of a decode step.
        memory_gb: device memory for caches.
        context: tokens of a served request; by default those of a sequence.
        kv_dtype: dtype of the served cache.
    """

    bandwidth: Annotated[float, Bounds(1e-3, 1e6)] | None = None
    step_ms: Annotated[float, Bounds(1e-6, 1e9)] | None = None
    batch: Annotated[int, Bounds(1, 1_000_000)] = 1
    memory_gb: Annotated[float, Bounds(1e-6, 1e6)] | None = None
    context: Annotated[int, TOKENS] | None = None
    kv_dtype: KvDtype = "fp8_e4m3"

    def requests(self, bytes_a_request: int) -> int | None:
        """Return how many requests fit into the device memory."""
        return None if self.memory_gb is None else int(self.memory_gb * 1e9 // bytes_a_request)
