"""The plans of the engines of this process: each engine has its own, found by its server arguments."""

from __future__ import annotations

from contextvars import ContextVar
from threading import RLock
from typing import Any, Protocol

from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.base import Family
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.preflight import Preflight
from sglang_indexcache.serving.proof import ProofHolder
from sglang_indexcache.serving.request import Request
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.hooks import installed_source
from sglang_indexcache.sglang.requested import ATTRIBUTE, asked_of


class Plan(Protocol):
    """The plan of one engine: each of its processes has one, and a scheduler's is proven."""

    @property
    def pattern(self) -> Pattern:
        """Pattern that the engine must run."""

    @property
    def family(self) -> Family:
        """Family of the engine's model."""

    @property
    def source(self) -> str:
        """Origin of the pattern, for people."""

    @property
    def proven(self) -> ProofHolder:
        """Proof of the engine in this process."""

    @property
    def serves(self) -> bool:
        """True if it serves one pattern, rather than switching for a search."""

    def require(self, feature: probes.Feature, flag: str) -> None:
        """Refuse a flag that needs what the installed SGLang does not have."""

    def check(self, server_args: Any) -> None:
        """Refuse flags that the engine must not have."""

    def schedule(self, model: str) -> tuple[Family, Pattern]:
        """Return the family of the model at a path, and the pattern for its configuration."""


_plans: dict[str, Plan] = {}  # by the engine's name
_lock = RLock()
_configured: ContextVar[str | None] = ContextVar("configured", default=None)
_loaded: list[Plan | None] = [None]


def plan_of(server_args: Any) -> Plan | None:
    """Return the plan of the engine with these server arguments; `None` without a request.

    Raises:
        IndexCacheError: if its request can't be served.
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
    """A context in which SGLang builds a model's configuration for the engine with these server arguments."""

    def __init__(self, server_args: Any) -> None:
        self._engine = asked_of(server_args)["engine"]

    def __enter__(self) -> None:
        self._token = _configured.set(self._engine)

    def __exit__(self, *_: Any) -> None:
        _configured.reset(self._token)


def configured() -> Plan | None:
    """Return the plan of the engine whose model's configuration is being built."""
    engine = _configured.get()
    return None if engine is None else _plans[engine]


def mark(model_config: Any) -> None:
    """Note on a configuration the engine that it is built for."""
    setattr(model_config, ATTRIBUTE, _configured.get())


def plan_of_config(model_config: Any) -> Plan | None:
    """Return the plan of the engine that a configuration was built for."""
    engine = getattr(model_config, ATTRIBUTE, None)
    return None if engine is None else _plans.get(engine)


def plan_of_runner(runner: Any) -> Plan | None:
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


def loaded_here(plan: Plan | None) -> None:
    """Note the plan of the model that this process has loaded last; a scheduler's process loads one."""
    _loaded[0] = plan


def plan_of_process() -> Plan | None:
    """Return the plan of the model that this process has loaded."""
    return _loaded[0]
