"""Engines by name: those of the core, and those of extras, by entry points of the group `indexcache.engines`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from indexcache_search.engines.base import Engine
from indexcache_search.engines.settings import RunSettings
from indexcache_search.errors import SearchError
from sglang_indexcache import ModelLayers
from sglang_indexcache.families import family_of
from sglang_indexcache.io.extensions import extensions

_MOST_GB = 1e6


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Callbacks that an engine gets when it is loaded.

    Attributes:
        log: returns a file for the output of a server that it starts.
        announce: hears a line before what takes minutes.
        warn: hears a line that a person should look at.
    """

    log: Callable[[], Path] = lambda: Path(os.devnull)
    announce: Callable[[str], None] = lambda line: None
    warn: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine, as `--engine` names it.

    Attributes:
        name: `--engine NAME`. Where several have it, the first that runs the model is taken, those of extras first.
        settings: a frozen dataclass; its fields, all with defaults, are what `--engine NAME:KEY=VALUE` takes.
        load: returns the engine of a model, for a `with` block that ends what was started.
        on_servers: whether it runs on SGLang's servers: `--endpoint` names them, or it starts one with further flags.
        runs: whether it evaluates patterns of a model.
    """

    name: str
    settings: type[Any]
    load: Callable[[str, RunSettings, Surroundings], AbstractContextManager[Engine]]
    on_servers: bool = False
    runs: Callable[[ModelLayers], bool] = lambda model: True


@dataclass(frozen=True, kw_only=True)
class TransformersSettings:
    """Settings of `transformers`, see `TransformersEngine.load`; `None` leaves one to the command."""

    attention: Literal["auto", "naive", "kernels"] | None = None
    prefix_cache_gb: float | None = None

    def __post_init__(self) -> None:
        size = self.prefix_cache_gb
        if size is not None and not 0 <= size <= _MOST_GB:
            raise SearchError(f"prefix_cache_gb: found {size:g}, expected 0 to {_MOST_GB:g}")


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """An engine without settings of its own."""


def kinds() -> tuple[EngineKind, ...]:
    """Return all engines."""
    return (*_extras(), _TRANSFORMERS, _SGLANG)


def kind_of(name: str, model: ModelLayers) -> EngineKind:
    """Return the engine with this name that evaluates patterns of `model`.

    Raises:
        SearchError: if there is none.
    """
    able = [kind for kind in kinds() if kind.runs(model)]
    for kind in able:
        if kind.name == name:
            return kind
    others = " or ".join(dict.fromkeys(kind.name for kind in able))
    raise SearchError(f"--engine {name} does not search {model.architecture}; expected {others}")


def _extras() -> tuple[EngineKind, ...]:
    return tuple(extensions("engines", EngineKind).values())


def _transformers(model: str, run: RunSettings, around: Surroundings) -> AbstractContextManager[Engine]:
    from indexcache_search.engines.transformers import TransformersEngine  # takes seconds to import

    return nullcontext(TransformersEngine.load(model, **run.here, notice=around.announce).side_by_side())


@contextmanager
def _sglang(model: str, run: RunSettings, around: Surroundings) -> Iterator[Engine]:
    from indexcache_search.engines.calibration_client import CalibrationServer
    from indexcache_search.engines.own_server import own_server
    from indexcache_search.engines.sglang import SglangEngine
    from indexcache_search.hf.loading import describe_model

    with ExitStack() as stack:
        servers = [CalibrationServer(url) for url in run.endpoints]
        if not servers:
            own = own_server(model, run.server_flags, around.log(), around.announce, around.warn)
            servers.append(stack.enter_context(own))
        engine = SglangEngine(servers, describe_model(model), run.batch_size, notice=around.warn)
        yield stack.enter_context(closing(engine))


_TRANSFORMERS = EngineKind(name="transformers", settings=TransformersSettings, load=_transformers)
_SGLANG = EngineKind(
    name="sglang",
    settings=NoSettings,
    load=_sglang,
    on_servers=True,
    runs=lambda model: family_of(model.architecture).sglang.calibrated,
)
