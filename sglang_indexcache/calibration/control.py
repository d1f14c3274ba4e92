"""Control requests on a rank: switch its pattern, checked first and then applied, and hand over measurements."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.measure import Action, Measure
from sglang_indexcache.calibration.preflight import Calibration, CalibrationError
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.messages import BUSY
from sglang_indexcache.io.refusal import refuse
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.proof import current_roles
from sglang_indexcache.serving.ranks import data_parallel_rank

METHOD = "indexcache"
_FLAGS = """
    json_model_override_args quantization load_format kv_cache_dtype attention_backend dsa_prefill_backend
    dsa_decode_backend dsa_topk_backend moe_runner_backend
""".split()  # SGLang's flags that losses depend on
_UNSET = (None, "", "{}", "auto")
_GRAPH_RUNNERS = ("prefill_cuda_graph_runner", "decode_cuda_graph_runner", "graph_runner")


class Controller:
    """A handler of control requests on one rank.

    Args:
        calibration: knows the schedule that the server started with; its S layers have no indexer.
        measures: what can be measured at all.

    Attributes:
        measures: by name, those that this SGLang has the places for.
    """

    def __init__(self, calibration: Calibration, measures: Sequence[Measure]) -> None:
        self._calibration = calibration
        self.measures = {measure.name: measure for measure in measures if calibration.has(measure.feature)}
        self._boot, self._switches = uuid4().hex, 0
        self._actions: dict[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
            protocol.STATUS: lambda scheduler, body: {},
            protocol.CHECK: self._check,
            protocol.SWITCH: self._switch,
            **{
                name: partial(self._measure, measure, action)
                for measure in measures
                for name, action in measure.actions().items()
            },
        }

    def handle(self, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        """Answer requests of method `indexcache`, and no others (around `Scheduler.handle_dumper_control`)."""
        if recv_req.method != METHOD:
            return original(scheduler, recv_req)
        from sglang.srt.managers.io_struct import DumperControlReqOutput

        try:
            answer = self.execute(scheduler, recv_req.body)
        except IndexCacheError as error:
            return DumperControlReqOutput(success=False, response=[], error=str(error))
        return DumperControlReqOutput(success=True, response=[answer])

    def execute(self, scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one request on this rank.

        Args:
            scheduler: SGLang's, on this rank.
            body: `action`, its arguments, and `dp_rank` if it is meant for one data-parallel rank; others only answer.

        Returns:
            The pattern that this rank runs now, how often it was switched since `boot`, and the result of the action.

        Raises:
            IndexCacheError: if it can't be done; nothing has changed then.
        """
        action = self._actions.get(str(body.get("action")))
        if action is None:
            raise CalibrationError(f"action is {body.get('action')!r}, expected {', '.join(self._actions)}")
        if self._calibration.proven.lost is not None:  # measurements would be of weights that are gone
            raise CalibrationError(f"the server's weights are {self._calibration.proven.lost}; expected a new server")
        rank, meant_for = data_parallel_rank(scheduler), body.get("dp_rank")
        runner = scheduler.tp_worker.model_runner
        answer = action(scheduler, body) if meant_for in (None, rank) else {}
        pattern, layers = self._calibration.family.sglang.configured(runner), self._roles(runner)
        wrong = [layer for layer, role in layers.items() if pattern[layer : layer + 1] != role]
        if wrong or len(pattern) != len(self._calibration.pattern):
            refuse(f"layer {min(wrong, default=0)} does not run what the configuration says")
        return {
            "protocol": protocol.VERSION,
            "boot": self._boot,
            "switches": self._switches,
            "pattern": pattern,
            "fingerprint": Pattern(pattern).fingerprint,
            "layers": len(layers),
            "process": os.getpid(),
            "dp_rank": rank,
            "config_sha256": self._calibration.config_sha256,
            "weights_sha256": self._calibration.weights_sha256,
            "versions": _versions(runner),
            "measures": self._measures(runner),
            **answer,
        }

    def _check(self, scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        native, runner = self._calibration.pattern, scheduler.tp_worker.model_runner
        Pattern(body.get("pattern")).check_fits(len(native), native.shared_layers)  # type: ignore[arg-type]
        for name in _GRAPH_RUNNERS:
            graphs = getattr(runner, name, None)
            if graphs is not None and graphs is not getattr(runner, "eager_runner", None):
                raise CalibrationError("CUDA graphs are on, and they keep the pattern they were captured with")
        if not scheduler.is_fully_idle():
            raise CalibrationError(protocol.busy(BUSY))
        return {}

    def _switch(self, scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        self._check(scheduler, body)
        pattern = Pattern(body["pattern"])
        self._switches += 1
        try:
            self._calibration.family.sglang.switch(scheduler.tp_worker.model_runner, pattern)
        except Exception as error:
            refuse(f"switching failed half-way: {error}")
        scheduler.flush_cache()
        for measure in self.measures.values():
            measure.switched(pattern == self._calibration.pattern)
        return {}

    def _measure(self, measure: Measure, action: Action, scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        runner = scheduler.tp_worker.model_runner
        if measure.name not in self._measures(runner):
            raise CalibrationError(measure.refusal)
        return action(self._calibration, runner, body)

    def _measures(self, runner: Any) -> list[str]:
        """Return what measures beside logprobs; nothing with pipeline stages, whose first one answers alone."""
        if len(self._roles(runner)) != len(self._calibration.pattern):
            return []
        return [name for name, measure in self.measures.items() if measure.fits(self._calibration)]

    def _roles(self, runner: Any) -> dict[int, str]:
        return current_roles(self._calibration.family.sglang, runner.model)


def _versions(runner: Any) -> dict[str, str]:
    """Return what losses depend on beside the pattern."""
    import torch

    parameter = next(runner.model.parameters())
    device = torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else "CPU"
    flags = {name: getattr(runner.server_args, name, None) for name in _FLAGS}
    return {
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "device": device,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "ranks": str(torch.distributed.get_world_size()),
        "chunk": str(runner.server_args.chunked_prefill_size),
        **{name: str(value) for name, value in flags.items() if value not in _UNSET},
    }
