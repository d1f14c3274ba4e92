"""A stand-in for what the plugin hooks in SGLang: its registry, and an engine whose scheduler is not another process.

Server arguments go to the scheduler pickled, as SGLang sends them; `between` runs before the scheduler looks at them.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from sglang_indexcache.sglang.probes import Feature, Need, SglangError


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


def _wrapped(function: Any, kind: HookType, hook: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(function, *args, **kwargs)
        if kind is HookType.BEFORE:
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper


class HookRegistry:
    """Applies what was registered for a place once in a process, as SGLang's does."""

    _hooks: ClassVar[dict[str, list[Any]]] = {}
    _patched: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, target: str, hook: Any, kind: HookType) -> None:
        cls._hooks.setdefault(target, []).append((kind, hook, None))

    @classmethod
    def apply_hooks(cls) -> None:
        for target in cls._hooks.keys() - cls._patched:
            cls._apply_target(target, cls._hooks[target])
            cls._patched.add(target)

    @classmethod
    def _apply_target(cls, target: str, hooks: list[Any]) -> None:
        module = max((name for name in sys.modules if target.startswith(name + ".")), key=len)
        owner: Any = sys.modules[module]
        *path, name = target.removeprefix(module + ".").split(".")
        for part in path:
            owner = getattr(owner, part)
        raw = vars(owner)[name]
        function = getattr(raw, "__func__", raw)
        for kind, hook, _ in hooks:
            function = _wrapped(function, kind, hook)
        setattr(owner, name, type(raw)(function) if isinstance(raw, classmethod | staticmethod) else function)


class ServerArgs:
    """Sealed once they are resolved; what is pickled is everything that stands on them."""

    def __init__(self, model_path: str, json_model_override_args: str = "{}", **flags: Any) -> None:
        self.disable_radix_cache, self.enable_fp32_lm_head = True, True
        self.host, self.chunked_prefill_size = "127.0.0.1", 64
        self.__dict__.update(flags, model_path=model_path, json_model_override_args=json_model_override_args)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_model_config" in self.__dict__:
            raise AttributeError(f"server_args.{name} assigned after resolution")
        self.__dict__[name] = value

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_model_config"}

    def resolve_once(self) -> None:
        if "_model_config" not in self.__dict__:
            self._model_config = resolve_name("sglang.srt.configs.model_config:ModelConfig").from_server_args(self)


class _Attention(nn.Module):
    def __init__(self, layer_id: int, role: str, index_topk: int) -> None:
        super().__init__()
        self.layer_id, self.skip_topk, self.next_skip_topk, self.is_nextn = layer_id, role == "S", False, False
        self.indexer = nn.ModuleDict({"wk": nn.Linear(2, 2)})
        vars(self.indexer)["index_topk"] = index_topk


def _load(model: nn.Module, value: float, lost: int | None = None) -> None:
    for module in model.modules():
        if isinstance(module, _Attention) and module.layer_id != lost:
            for parameter in module.parameters():
                parameter.data.fill_(value)


def install(monkeypatch: pytest.MonkeyPatch, between: Callable[[], None]) -> Any:
    """Put the stand-in in the place of SGLang; what is returned starts engines."""

    class ModelConfig:
        ignores: ClassVar[set[str]] = set()

        def __init__(self, model_path: str, model_override_args: str, is_draft_model: bool = False) -> None:
            self.model_path, self.overrides = model_path, json.loads(model_override_args)
            config = json.loads(Path(model_path, "config.json").read_text())
            config |= {key: value for key, value in self.overrides.items() if key not in self.ignores}
            self.layers, self.index_topk = config["num_hidden_layers"], config["index_topk"]
            self.context_len = 256

        @staticmethod
        def from_server_args(server_args: Any, is_draft_model: bool = False) -> ModelConfig:
            path, text = server_args.model_path, server_args.json_model_override_args
            return ModelConfig(path, model_override_args=text, is_draft_model=is_draft_model)

    def _initialize_model(model_config: Any, load_config: Any) -> nn.Module:
        roles = model_config.overrides.get("index_topk_pattern", "F" * model_config.layers)
        return nn.ModuleList([_Attention(layer, role, model_config.index_topk) for layer, role in enumerate(roles)])

    class ModelRunner:
        def __init__(self, server_args: Any, model_config: Any) -> None:
            self.server_args, self.model_config, self.is_draft_worker = server_args, model_config, False
            self.max_total_num_tokens = 1024
            self.load_model()

        def load_model(self) -> None:
            self.model = loader._initialize_model(self.model_config, None)
            _load(self.model, 1.0)

        def init_attention_backends(self) -> None: ...

        def init_cuda_graphs(self) -> None: ...

    class SchedulerWeightUpdaterManager:
        def __init__(self, tp_worker: Any) -> None:
            self.tp_worker, self._session = tp_worker, None

        def update_weights_from_disk(self, recv_req: Any) -> Any:
            if recv_req.error is not None:
                return SimpleNamespace(success=False, message=recv_req.error)
            _load(self.tp_worker.model_runner.model, recv_req.value, recv_req.lost)
            return SimpleNamespace(success=True, message="Succeeded")

        def update_weights_from_tensor(self, recv_req: Any) -> Any:
            for layer in recv_req.tensors:
                for parameter in self.tp_worker.model_runner.model[layer].indexer.parameters():
                    parameter.data.fill_(recv_req.value)
            return SimpleNamespace(success=recv_req.error is None, message="Succeeded")

        def begin_weight_update(self, recv_req: Any) -> Any:
            self._session = recv_req
            return SimpleNamespace(success=True, message="Succeeded")

        def end_weight_update(self, recv_req: Any) -> Any:
            self._session = None
            return SimpleNamespace(success=True, message="Succeeded")

        def resume_memory_occupation(self, recv_req: Any) -> None:
            for layer in self.tp_worker.model_runner.model:
                layer.indexer.wk.weight.data.fill_(7.0)  # whatever was there

        def release_memory_occupation(self, recv_req: Any) -> None: ...

    class SchedulerOutputStreamer:
        has_additional_customized_info: ClassVar[bool] = False

        def __init__(self, server_args: Any) -> None:
            self.server_args, self.rust_server = server_args, None

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, Any]:
            return {}

    class Scheduler:
        def __init__(self, server_args: Any) -> None:
            self.server_args, self.dp_rank = server_args, 0
            self.init_output_streamer()
            config = ModelConfig.from_server_args(server_args)
            self.tp_worker = SimpleNamespace(model_runner=ModelRunner(server_args, config))
            self.updater = SchedulerWeightUpdaterManager(self.tp_worker)

        def init_output_streamer(self) -> None:
            self.output_streamer = SchedulerOutputStreamer(self.server_args)

        def get_init_info(self) -> dict[str, Any]:
            return {"status": "ready"}

        def get_internal_state(self, recv_req: Any) -> Any:
            return SimpleNamespace(internal_state={})

        def handle_dumper_control(self, recv_req: Any) -> Any:
            return "SGLang's own"

    class Engine:
        loads_plugins = True  # before it launches, as launchers do that know of them

        def __init__(self, server_args: ServerArgs | None = None, **arguments: Any) -> None:
            if self.loads_plugins:
                load_plugins()
            self.server_args = server_args or ServerArgs(**arguments)
            _, result = self._launch_subprocesses(server_args=self.server_args)
            self.scheduler, self.infos = result.scheduler, result.scheduler_infos

        @classmethod
        def _launch_subprocesses(cls, server_args: ServerArgs) -> Any:
            server_args.resolve_once()
            load_plugins()
            result, _ = cls._launch_scheduler_processes(server_args)
            result.wait_for_ready()
            return None, result

        @classmethod
        def _launch_scheduler_processes(cls, server_args: ServerArgs) -> Any:
            sent, result = pickle.dumps(server_args), SimpleNamespace(scheduler_infos=[])

            def wait_for_ready() -> None:
                result.scheduler = Scheduler(pickle.loads(sent))
                result.scheduler_infos.append(result.scheduler.get_init_info())

            result.wait_for_ready = wait_for_ready
            between()
            return result, None

        def state(self) -> Any:
            return self.scheduler.get_internal_state(None).internal_state.get("indexcache")

        def answers(self, *finished: bool) -> dict[str, Any]:
            """What a batch of requests, finished or not, says beside its tokens."""
            streamer = self.scheduler.output_streamer
            requests = [SimpleNamespace(finished=lambda item=item: item) for item in finished]
            found: dict[str, Any] = {}
            if streamer.has_additional_customized_info:
                found = streamer.build_additional_customized_info(requests)
            return found

        def roles(self) -> str:
            return "".join("S" if layer.skip_topk else "F" for layer in self.scheduler.tp_worker.model_runner.model)

    def load_plugins() -> None:
        if not HookRegistry._patched:
            resolve_name("sglang_indexcache.plugin:register")()
            HookRegistry.apply_hooks()

    loader = ModuleType("sglang.srt.model_loader.loader")
    places: dict[str, dict[str, Any]] = {
        "plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "configs.model_config": {"ModelConfig": ModelConfig},
        "entrypoints.engine": {"Engine": Engine},
        "managers.scheduler": {"Scheduler": Scheduler},
        "model_executor.model_runner": {"ModelRunner": ModelRunner},
        "managers.scheduler_components.weight_updater": {
            "SchedulerWeightUpdaterManager": SchedulerWeightUpdaterManager
        },
        "managers.scheduler_components.output_streamer": {"SchedulerOutputStreamer": SchedulerOutputStreamer},
        "managers.io_struct": {
            "UpdateWeightFromDiskReqOutput": SimpleNamespace,
            "GetInternalStateReqOutput": SimpleNamespace(internal_state=None),
        },
        "entrypoints.http_server": {"_setup_and_run_http_server": lambda server_args, tokenizer_manager: None},
        "distributed.parallel_state": {"get_world_group": lambda: SimpleNamespace(world_size=1)},
        "model_loader.loader": {"_initialize_model": _initialize_model},
    }
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, content in places.items():
        module = loader if name == "model_loader.loader" else ModuleType(f"sglang.srt.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    monkeypatch.setattr(HookRegistry, "_patched", set())
    for module_name in ("serving", "serving.engines", "calibration"):
        monkeypatch.setattr(f"sglang_indexcache.{module_name}.installed_source", lambda features: Source())
    for name in ("_plans", "_applied", "_controllers"):
        owner = {"_plans": "serving.engines", "_applied": "serving", "_controllers": "calibration"}[name]
        monkeypatch.setattr(f"sglang_indexcache.{owner}.{name}", [] if name == "_applied" else {})
    torch.manual_seed(0)
    for variable in [name for name in os.environ if name.startswith("SGLANG_")]:
        monkeypatch.delenv(variable)
    return Engine


class Source:
    """Has what the stand-in has."""

    version = "0.0"

    def missing(self, need: Need) -> str | None:
        try:
            resolve_name(f"sglang.{need.module}:{need.name}")
        except (ImportError, AttributeError):
            return f"needs {need.target}"
        return None

    def refusal(self, feature: Feature) -> str | None:
        if feature.name == "pipeline":
            return None
        return next((reason for reason in map(self.missing, feature.needs) if reason is not None), None)

    def unread(self, feature: Feature) -> None:
        return None

    def require(self, *features: Feature) -> None:
        if any(feature.name == "ray" for feature in features):
            raise SglangError("no load_plugins")
