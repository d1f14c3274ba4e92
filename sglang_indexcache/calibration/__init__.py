"""Calibration mode: a server on which a search switches the pattern between evaluations.

It starts with every layer F (the checkpoint's own schedule where layers are locked), without what would remember an
earlier pattern: prefix caches and CUDA graphs. Switching is a few attribute writes a layer, on all ranks, through a
control request that SGLang already fans out. A server in serving mode has none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.control import METHOD, Controller
from sglang_indexcache.calibration.divergence import Divergence, limit_gb
from sglang_indexcache.calibration.lm_head import around_logits
from sglang_indexcache.calibration.measure import Measure
from sglang_indexcache.calibration.overlap import Overlap
from sglang_indexcache.calibration.preflight import Calibration
from sglang_indexcache.calibration.route import Route
from sglang_indexcache.io.extensions import extensions
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
        found.add("AROUND", probes.LOGPROBS, around_logprobs)
    if source.missing(probes.LOGITS) is None:
        found.add("AROUND", probes.LOGITS, around_all_logits)
    if source.refusal(probes.SAMPLING) is None:
        found.add("BEFORE", probes.FORWARD, before_forward)
    found.add("AROUND", probes.CONTROL, handle_control)
    found.add("AROUND", probes.HTTP, serve)
    return found


def offer() -> None:
    """Let engines of this process be planned for calibration, those that ask for it."""
    engines.plan_searches_by(_new_plan)


def _new_plan() -> Calibration:
    plan = Calibration(installed_source((*probes.REQUIRED, probes.CALIBRATE)))
    if not _controllers:
        hooks().apply()
    begin(plan)
    return plan


def begin(plan: EnginePlan) -> None:
    """Make the controller of one engine, once in each of its processes.

    Raises:
        IndexCacheError: if the memory limit in the environment is no number, or a measure can't be loaded.
    """
    assert isinstance(plan, Calibration)
    if plan not in _controllers:
        added = (measure() for measure in extensions("measures", Measure).values())
        _controllers[plan] = Controller(plan, (Divergence(limit_gb()), Overlap(), *added))


def _of_process() -> Controller | None:
    """Return the controller whose model this process has loaded: logits know of no server."""
    plan = engines.plan_of_process()
    return _controllers[plan] if isinstance(plan, Calibration) else None


def around_logprobs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Measure divergences (around `InputLogprobProcessor.forward`)."""
    controller = _of_process()
    divergence = None if controller is None else controller.measures.get(protocol.KL)
    if not isinstance(divergence, Divergence):
        return original(*args, **kwargs)
    return divergence.around_logprobs(original, *args, **kwargs)


def around_all_logits(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note the requests of a pass and run the LM head; SGLang warns of two hooks around `LogitsProcessor.forward`."""
    controller = _of_process()
    if controller is None:
        return original(*args, **kwargs)
    divergence = controller.measures.get(protocol.KL)
    return around_logits(divergence if isinstance(divergence, Divergence) else None, original, *args, **kwargs)


def before_forward(*args: Any, **kwargs: Any) -> None:
    """Find the rows to measure (before `ModelRunner.forward`)."""
    controller = _of_process()
    for measure in controller.measures.values() if controller is not None else ():
        measure.before_forward(*args, **kwargs)


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
    with _with_route(arguments["tokenizer_manager"]):
        return original(*args, **kwargs)


@contextmanager
def _with_route(tokenizer_manager: Any) -> Iterator[None]:
    """Answer control requests while the block runs: SGLang has one application for all servers of a process."""
    from fastapi import Body
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.io_struct import DumperControlReqInput
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def ask(body: dict[str, Any]) -> Any:
        return await tokenizer_manager.dumper_control(DumperControlReqInput(method=METHOD, body=body))

    route = Route(ask)

    async def control(action: str, body: dict[str, Any] = Body(default={})) -> Any:  # noqa: B008
        code, answer = await route.answer(action, body)
        return JSONResponse(answer, status_code=code)

    before = list(app.router.routes)
    app.add_api_route(protocol.path("{action}"), auth_level(AuthLevel.ADMIN_OPTIONAL)(control), methods=["POST"])
    try:
        yield
    finally:
        app.router.routes[:] = [route for route in app.router.routes if route in before]
