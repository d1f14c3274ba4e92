"""Calibration mode: a server on which a search switches the pattern between evaluations.

It starts with every layer F (the checkpoint's own schedule where layers are locked), without what would remember an
earlier pattern: prefix caches and CUDA graphs. Switching is a few attribute writes a layer, on all ranks, through a
control request that SGLang already fans out. A server in serving mode has none of this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_indexcache.calibration.control import Controller
from sglang_indexcache.calibration.divergence import Divergence, limit_gb
from sglang_indexcache.calibration.lm_head import around_logits
from sglang_indexcache.calibration.overlap import Overlap
from sglang_indexcache.calibration.preflight import Calibration
from sglang_indexcache.calibration.route import with_route
from sglang_indexcache.calibration.selections import Selections
from sglang_indexcache.serving import engines
from sglang_indexcache.serving.preflight import EnginePlan
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.hooks import Hooks, bound_to, installed_source

_controllers: dict[Calibration, Controller] = {}


def hooks() -> Hooks:
    """Return the hooks of calibration mode beside those of serving; without a calibration server they do nothing.

    Raises:
        SglangError: if this SGLang lacks what switching needs.
    """
    source, found = installed_source((*probes.REQUIRED, probes.CALIBRATE)), Hooks()
    if source.refusal(probes.DIVERGENCE) is None:
        found.around(probes.LOGPROBS, around_logprobs)
    if source.missing(probes.LOGITS) is None:
        found.around(probes.LOGITS, around_all_logits)
    if source.refusal(probes.SAMPLING) is None:
        found.before(probes.FORWARD, before_forward)
    found.around(probes.CONTROL, handle_control)
    found.around(probes.HTTP, serve)
    return found


def begin(plan: EnginePlan) -> None:
    """Make the controller of one engine, once in each of its processes.

    Raises:
        CalibrationError: if the memory limit in the environment is no number.
    """
    assert isinstance(plan, Calibration)
    if plan not in _controllers:
        overlap = selections = None
        divergence = Divergence(limit_gb()) if plan.has(probes.DIVERGENCE) else None
        if plan.has(probes.SAMPLING):
            overlap, selections = Overlap(), Selections(plan)
        _controllers[plan] = Controller(plan, divergence, overlap, selections)


def before_loading() -> None:
    """Make all tensor-parallel ranks attend to what the first one selected, in a process that loads the model."""
    os.environ["SGLANG_DSA_TOPK_BROADCAST"] = "1"


def _of_process() -> Controller | None:
    """Return the controller whose model this process has loaded: logits know of no server."""
    plan = engines.plan_of_process()
    return _controllers[plan] if isinstance(plan, Calibration) else None


def around_logprobs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Measure divergences (around `InputLogprobProcessor.forward`)."""
    controller = _of_process()
    if controller is None or controller.divergence is None:
        return original(*args, **kwargs)
    return controller.divergence.around_logprobs(original, *args, **kwargs)


def around_all_logits(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note the requests of a pass and run the LM head; SGLang warns of two hooks around `LogitsProcessor.forward`."""
    controller = _of_process()
    if controller is None:
        return original(*args, **kwargs)
    return around_logits(controller.divergence, original, *args, **kwargs)


def before_forward(*args: Any, **kwargs: Any) -> None:
    """Find the rows to measure (before `ModelRunner.forward`)."""
    controller = _of_process()
    if controller is not None and controller.overlap is not None and controller.selections is not None:
        controller.overlap.before_forward(*args, **kwargs)
        controller.selections.before_forward(*args, **kwargs)


def handle_control(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Answer control requests (around `Scheduler.handle_dumper_control`)."""
    plan = engines.plan_of(scheduler.server_args)
    if not isinstance(plan, Calibration):
        return original(scheduler, recv_req)
    return _controllers[plan].handle(original, scheduler, recv_req)


def serve(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add the route while a server runs (around `_setup_and_run_http_server`): its application is the process's."""
    arguments = bound_to(original, args, kwargs).arguments
    if not isinstance(engines.plan_of(arguments["server_args"]), Calibration):
        return original(*args, **kwargs)
    with with_route(arguments["tokenizer_manager"]):
        return original(*args, **kwargs)
