"""What the engines of this process are asked for: each has a plan of its own, found by its server arguments."""

from __future__ import annotations

from contextvars import ContextVar
from threading import RLock
from typing import Any, Protocol

from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.base import Family
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.preflight import Preflight
from sglang_indexcache.serving.proof import Proven
from sglang_indexcache.serving.request import Request
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.hooks import installed_source
from sglang_indexcache.sglang.requested import ATTRIBUTE, asked_of


class Plan(Protocol):
    """What one engine must run; in each of its processes there is one, and a scheduler's is proven."""

    @property
    def pattern(self) -> Pattern: ...

    @property
    def family(self) -> Family: ...

    @property
    def source(self) -> str:
        """Where the pattern comes from, for people."""

    @property
    def proven(self) -> Proven: ...

    @property
    def serves(self) -> bool:
        """Whether it serves one pattern, rather than switching for a search."""

    def require(self, feature: probes.Feature, flag: str) -> None:
        """Refuse a flag that needs what the installed SGLang does not have."""

    def check(self, server_args: Any) -> None:
        """Refuse what these server arguments must not ask for besides."""

    def schedule(self, model: str) -> tuple[Family, Pattern]:
        """The family of the model at a path, and the pattern that it is to be configured with."""


_plans: dict[str, Plan] = {}  # by the engine's name
_lock = RLock()
_configured: ContextVar[str | None] = ContextVar("configured", default=None)
_loaded: list[Plan | None] = [None]


def plan_of(server_args: Any) -> Plan | None:
    """The plan of the engine with these server arguments; `None` if it is asked for nothing.

    Raises:
        IndexCacheError: if what it is asked for can't be used.
    """
    asked = asked_of(server_args)
    if not asked:
        return None
    with _lock:
        if asked["engine"] not in _plans:
            _plans[asked["engine"]] = _new_plan(asked)
        return _plans[asked["engine"]]


def _new_plan(asked: dict[str, Any]) -> Plan:
    if asked["calibrate"]:
        from sglang_indexcache.calibration.preflight import Calibration

        return Calibration(installed_source((*probes.REQUIRED, probes.CALIBRATE)))
    return Preflight(Request.of(asked), installed_source(probes.REQUIRED))


class configuring:  # noqa: N801  (a context)
    """While SGLang builds the configuration of a model for the engine with these server arguments."""

    def __init__(self, server_args: Any) -> None:
        self._engine = asked_of(server_args)["engine"]

    def __enter__(self) -> None:
        self._token = _configured.set(self._engine)

    def __exit__(self, *_: Any) -> None:
        _configured.reset(self._token)


def configured() -> Plan | None:
    """The plan of the engine whose model's configuration is being built."""
    engine = _configured.get()
    return None if engine is None else _plans[engine]


def mark(model_config: Any) -> None:
    """Note on a configuration which engine it is built for."""
    setattr(model_config, ATTRIBUTE, _configured.get())


def plan_of_config(model_config: Any) -> Plan | None:
    """The plan of the engine that a configuration was built for."""
    engine = getattr(model_config, ATTRIBUTE, None)
    return None if engine is None else _plans.get(engine)


def plan_of_runner(runner: Any) -> Plan | None:
    """The plan of the engine whose target model a `ModelRunner` runs; `None` of draft models.

    Raises:
        ProofError: if its model's configuration was not built for that engine.
    """
    if getattr(runner, "is_draft_worker", False):
        return None
    plan = plan_of(runner.server_args)
    if plan is not None and plan_of_config(runner.model_config) is not plan:
        raise ProofError("SGLang built a model without a configuration that the pattern could be handed over in")
    return plan


def loaded_here(plan: Plan | None) -> None:
    """Note the plan of the model that this process has loaded last; a scheduler's process loads one."""
    _loaded[0] = plan


def plan_of_process() -> Plan | None:
    """The plan of the model that this process has loaded."""
    return _loaded[0]
