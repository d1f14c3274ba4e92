"""Switching the pattern of a running server: checked first, then applied, on every rank alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from sglang_indexcache.calibration.preflight import Calibration, CalibrationError
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.pattern import SHARED, Pattern
from sglang_indexcache.plugin import refuse
from sglang_indexcache.serving.proof import attention_modules, current_roles
from sglang_indexcache.spellings import FREQ_KEY, PATTERN_KEY, TYPES_KEY, to_sglang

METHOD = "indexcache"
STATUS, CHECK, SWITCH = "status", "check", "switch"
BUSY = "busy"
_GRAPH_RUNNERS = ("prefill_cuda_graph_runner", "decode_cuda_graph_runner", "graph_runner")


def controller(calibration: Calibration) -> Callable[..., Any]:
    """Hook around `Scheduler.handle_dumper_control`: answer requests of method `indexcache`, leave all others alone."""

    def around(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        if recv_req.method != METHOD:
            return original(scheduler, recv_req)
        from sglang.srt.managers.io_struct import DumperControlReqOutput

        try:
            answer = execute(scheduler, recv_req.body, calibration)
        except IndexCacheError as error:
            return DumperControlReqOutput(success=False, response=[], error=str(error))
        return DumperControlReqOutput(success=True, response=[answer])

    return around


def execute(scheduler: Any, body: Mapping[str, Any], calibration: Calibration) -> dict[str, Any]:
    """Carry out one request on this rank.

    Args:
        body: `{"action": "status" | "check" | "switch", "pattern": "FS..."}`.
        calibration: knows the schedule that the server started with; its S layers have no indexer.

    Returns:
        The pattern that this rank runs now.

    Raises:
        IndexCacheError: if it can't be done; nothing has changed then.
    """
    runner, native = scheduler.tp_worker.model_runner, calibration.pattern
    action = body.get("action")
    if action not in (STATUS, CHECK, SWITCH):
        raise CalibrationError(f"action is {action!r}, expected {STATUS}, {CHECK} or {SWITCH}")
    if action != STATUS:
        pattern = Pattern(body.get("pattern"))  # type: ignore[arg-type]  # anything may come over HTTP
        pattern.check_fits(len(native), native.shared_layers)
        _check_switchable(scheduler, runner)
        if action == SWITCH:
            apply(runner, pattern)
            scheduler.flush_cache()
    return {**_status(runner, len(native)), "config_sha256": calibration.config_sha256, "versions": _versions(runner)}


def _check_switchable(scheduler: Any, runner: Any) -> None:
    for name in _GRAPH_RUNNERS:
        graphs = getattr(runner, name, None)
        if graphs is not None and graphs is not getattr(runner, "eager_runner", None):
            raise CalibrationError("CUDA graphs are on, and they keep the pattern they were captured with")
    if not scheduler.is_fully_idle():
        raise CalibrationError(f"{BUSY}: requests are running")


def apply(runner: Any, pattern: Pattern) -> None:
    """Make the layers of this rank run `pattern`; a failure half-way ends the process."""
    try:
        for module in attention_modules(runner.model):
            following = module.layer_id + 1
            module.skip_topk = pattern[module.layer_id] == SHARED
            module.next_skip_topk = following < len(pattern) and pattern[following] == SHARED
        config = runner.model_config.hf_config  # pipeline stages ask it whether to hand indices over
        for key, value in to_sglang(pattern).items():
            if key != TYPES_KEY or getattr(config, TYPES_KEY, None) is not None:
                setattr(config, key, value)
    except Exception as error:
        refuse(f"switching failed half-way: {error}")


def _versions(runner: Any) -> dict[str, str]:
    """What losses depend on beside the pattern."""
    import torch

    parameter = next(runner.model.parameters())
    device = torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else "CPU"
    return {
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "device": device,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "ranks": str(torch.distributed.get_world_size()),
        "chunk": str(runner.server_args.chunked_prefill_size),
    }


def _status(runner: Any, num_layers: int) -> dict[str, Any]:
    config = runner.model_config.hf_config
    roles = getattr(config, PATTERN_KEY)
    layers = current_roles(runner.model)
    wrong = [layer for layer, role in layers.items() if roles[layer] != role]
    if wrong or len(roles) != num_layers or getattr(config, FREQ_KEY) != 1:
        refuse(f"layer {min(wrong, default=0)} does not run what the configuration says")
    return {"pattern": roles, "fingerprint": Pattern(roles).fingerprint, "layers": len(layers), "process": os.getpid()}
