"""Settings of a model that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_indexcache.http.address import Address
from sglang_indexcache.pattern.selection import PatternSelection


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a model that runs.

    Attributes:
        engine: name of the engine, see `registry`.
        own: settings of the engine's own that are given, by name; see `EngineKind.settings`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: of the weights; `None` leaves it to the engine.
        batch_size: sequences of a forward, or of a request.
        endpoints: servers in calibration mode; without any, an engine on servers starts one.
        server_arguments: SGLang's own flags for that one.
        selection: of patterns of a model without indexers; by default the family's.
    """

    engine: str = "transformers"
    own: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    dtype: str | None = None
    batch_size: int = 1
    endpoints: tuple[Address, ...] = ()
    server_arguments: tuple[str, ...] = ()
    selection: PatternSelection | None = None

    @property
    def server_flags(self) -> tuple[str, ...]:
        """Flags of the search's own server, `device` and `dtype` included."""
        device = () if self.device == "auto" else ("--device", self.device)
        dtype = () if self.dtype is None else ("--dtype", self.dtype)
        return (*device, *dtype, *self.server_arguments)

    @property
    def here(self) -> dict[str, Any]:
        """Arguments of `TransformersEngine.load` for a model that runs in this process."""
        dtype = self.dtype or "float32"
        given = {"device": self.device, "dtype": dtype, "batch_size": self.batch_size, "selection": self.selection}
        return {**given, **self.own}
