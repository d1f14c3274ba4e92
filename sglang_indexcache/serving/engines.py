"""The plans of the engines of this process: each engine has its own, found by its server arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.serving.preflight import EnginePlan, Preflight
from sglang_indexcache.serving.request import carried, wanted
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.hooks import installed_source
from sglang_indexcache.sglang.requested import ATTRIBUTE, amend, request_of

_plans: dict[str, EnginePlan] = {}  # by the engine's name
_lock = RLock()
_configured: ContextVar[str | None] = ContextVar("configured", default=None)
_loaded: list[EnginePlan | None] = [None]
_of_searches: list[Callable[[], EnginePlan]] = []


def plan_of(server_args: Any) -> EnginePlan | None:
    """Return the plan of the engine with these server arguments; `None` without a request.

    Raises:
        IndexCacheError: if its request can't be served.
    """
    request = request_of(server_args)
    if request is None:
        return None
    with _lock:
        if request.engine not in _plans:
            if request.asked.calibrate:
                _plans[request.engine] = _of_searches[0]()
            else:
                spec = wanted(request)
                amend(server_args, carried=carried(spec))
                _plans[request.engine] = Preflight(spec, request.asked, installed_source(probes.REQUIRED))
        return _plans[request.engine]


def plan_searches_by(make: Callable[[], EnginePlan]) -> None:
    """Let `make` make the plans of engines on which a search switches patterns."""
    _of_searches[:] = [make]


@contextmanager
def configuring(server_args: Any) -> Iterator[None]:
    """Let SGLang build a model's configuration for the engine with these server arguments while the block runs."""
    request = request_of(server_args)
    token = _configured.set(None if request is None else request.engine)
    try:
        yield
    finally:
        _configured.reset(token)


def configured() -> EnginePlan | None:
    """Return the plan of the engine whose model's configuration is being built."""
    engine = _configured.get()
    return None if engine is None else _plans[engine]


def mark(model_config: Any) -> None:
    """Note on a configuration the engine that it is built for."""
    setattr(model_config, ATTRIBUTE, _configured.get())


def plan_of_config(model_config: Any) -> EnginePlan | None:
    """Return the plan of the engine that a configuration was built for."""
    engine = getattr(model_config, ATTRIBUTE, None)
    return None if engine is None else _plans.get(engine)


def plan_of_runner(runner: Any) -> EnginePlan | None:
    """Return the plan of the engine whose target model a `ModelRunner` runs; `None` for draft models.

    Raises:
        ProofError: if its model's configuration was not built for that engine.
    """
    if getattr(runner, "is_draft_worker", False):
        return None
    plan = plan_of(runner.server_args)
    if plan is not None and plan_of_config(runner.model_config) is not plan:
        raise ProofError("SGLang built a model without a configuration that the pattern could be handed over in")
    return plan


def loaded_here(plan: EnginePlan | None) -> None:
    """Note the plan of the model that this process has loaded last; a scheduler's process loads one."""
    _loaded[0] = plan


def plan_of_process() -> EnginePlan | None:
    """Return the plan of the model that this process has loaded."""
    return _loaded[0]
