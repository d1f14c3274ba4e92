"""The features of an SGLang, read from its source without importing it: one line for each thing that is missing.

Every feature lists what it needs. Nothing here compares versions, so a fork or a nightly is judged by what it has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.sglang.read_sources import READ, digest


class SglangError(IndexCacheError):
    """An SGLang that is not there, lacks what a feature needs, or refuses a model."""


@dataclass(frozen=True)
class Need:
    """A function, class or field of SGLang's source that a feature needs.

    Attributes:
        module: dotted name below `sglang.`
        name: function, `Class`, `Class.method` or `Class.field`.
        parameters: names that the function must take.
        mentions: attributes, string keys or called functions that must occur in the body.
        without: names that must not occur there: with them, SGLang does by itself what we would do.
        closed: whether the function must take no other parameters, since a replacement would not know what they mean.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    closed: bool = False

    @property
    def target(self) -> str:
        """Dotted path that a hook is registered on."""
        return f"sglang.{self.module}.{self.name}"


@dataclass(frozen=True)
class Feature:
    """A feature of this plugin.

    Attributes:
        name: short, as in the table.
        does: use of it for a user.
        needs: all of them, or the feature is refused.
        otherwise: what happens without it.
        reads: functions that it replaces, and those that call them: their source must be one that was read
            (`read_sources`), since what they mean can change without another name or parameter.
    """

    name: str
    does: str
    needs: tuple[Need, ...]
    otherwise: str
    reads: tuple[Need, ...] = ()


MODEL_CONFIG = Need(
    "srt.configs.model_config", "ModelConfig.__init__", ("model_path", "model_override_args", "is_draft_model")
)
SERVER_ARGS = Need("srt.configs.model_config", "ModelConfig.from_server_args", ("server_args", "is_draft_model"))
LAUNCH = Need("srt.entrypoints.engine", "Engine._launch_subprocesses", ("server_args",))
START = Need("srt.entrypoints.engine", "Engine._launch_scheduler_processes", ("server_args",))
READY = Need("srt.managers.scheduler", "Scheduler.get_init_info")
NEW_MODEL = Need("srt.model_loader.loader", "_initialize_model", ("model_config", "load_config"))
LOAD_MODEL = Need("srt.model_executor.model_runner", "ModelRunner.load_model")
LOAD_BACKENDS = Need("srt.model_executor.model_runner", "ModelRunner.init_attention_backends")
LOAD_GRAPHS = Need("srt.model_executor.model_runner", "ModelRunner.init_cuda_graphs")
WORLD = Need("srt.distributed.parallel_state", "get_world_group")
GATHER = Need("srt.distributed.parallel_state", "GroupCoordinator.all_gather_object", ("obj",))
SCHEDULER = Need("srt.managers.scheduler", "Scheduler.__init__", ("server_args",))
STATE = Need("srt.managers.scheduler", "Scheduler.get_internal_state", ("recv_req",))
STATE_REPLY = Need("srt.managers.io_struct", "GetInternalStateReqOutput.internal_state")
FORWARD = Need("srt.model_executor.model_runner", "ModelRunner.forward", ("forward_batch",))
METRICS = Need(
    "srt.observability.metrics_collector", "SchedulerMetricsCollectorContext.current_scheduler_metrics_enabled"
)
COLLECTOR = Need("srt.managers.scheduler", "Scheduler", mentions=("metrics_collector_context",))
STREAMER = Need("srt.managers.scheduler", "Scheduler.init_output_streamer", mentions=("output_streamer",))
ANSWER = Need(
    "srt.managers.scheduler_components.output_streamer",
    "SchedulerOutputStreamer.build_additional_customized_info",
    ("reqs",),
)
STORAGE = Need("srt.managers.cache_controller", "HiCacheController._generate_storage_config", ("model_name",))
STORAGE_CONFIG = Need("srt.mem_cache.hicache_storage", "HiCacheStorageConfig.model_name")
PEER = Need(
    "srt.disaggregation.common.conn", "CommonKVManager.__init__", ("args", "server_args"), ("kv_cache_dtype_str",)
)
MEETING = Need("srt.disaggregation.common.conn", "CommonKVManager.try_ensure_parallel_info", ("bootstrap_addr",))
CONTROL = Need("srt.managers.scheduler", "Scheduler.handle_dumper_control", ("recv_req",))
CONTROL_REPLY = Need("srt.managers.io_struct", "DumperControlReqOutput.response")
CONTROL_REQUEST = Need("srt.managers.io_struct", "DumperControlReqInput.body")
CONTROL_FAN_OUT = Need("srt.managers.tokenizer_control_mixin", "TokenizerControlMixin.dumper_control", ("obj",))
IDLE = Need("srt.managers.scheduler", "Scheduler.is_fully_idle")
FLUSH = Need("srt.managers.scheduler", "Scheduler.flush_cache")
LOGITS = Need("srt.layers.logits_processor", "LogitsProcessor.forward", ("lm_head", "logits_metadata"))
LOGPROBS = Need("srt.layers.logprob_processor", "InputLogprobProcessor.forward", ("pruned_states", "get_logits_fn"))
REQUEST_IDS = Need("srt.model_executor.forward_batch_info", "ForwardBatch.rids")
CAPTURER = Need("srt.state_capturer.indexer_topk", "set_global_indexer_capturer", ("capturer",))
CAPTURE = Need("srt.state_capturer.indexer_topk", "maybe_capture_indexer_topk", ("layer_id", "topk_indices"))
ROUTING = Need("srt.managers.io_struct", "GenerateReqInput.routed_dp_rank")
RAY_ACTOR = Need("srt.ray.scheduler_actor", "SchedulerActor", mentions=("load_plugins",))
WARM_UP = Need("srt.entrypoints.http_server", "_wait_and_warmup", ("server_args", "execute_warmup_func"))
KILL = Need("srt.utils.common", "kill_process_tree", ("parent_pid", "include_parent"))
HTTP = Need("srt.entrypoints.http_server", "_setup_and_run_http_server", ("server_args", "tokenizer_manager"))

UPDATES = tuple(
    Need("srt.managers.scheduler_components.weight_updater", f"SchedulerWeightUpdaterManager.{method}", ("recv_req",))
    for method in (
        *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
        *("update_weights_from_ipc", "release_memory_occupation", "resume_memory_occupation"),
        *("begin_weight_update", "end_weight_update"),  # from 0.5.22 on
    )
)

SERVE = Feature(
    "serve",
    "hand the pattern over through SGLang's own configuration",
    (MODEL_CONFIG, SERVER_ARGS, SCHEDULER),
    "no server",
)
PROVE = Feature(
    "prove",
    "compare every attention module with the pattern, on every rank",
    (LOAD_MODEL, WORLD, GATHER, READY, LAUNCH, START),
    "no server",
)
WEIGHTS = Feature("weights", "see that the indexers of F layers were loaded", (NEW_MODEL, LOAD_MODEL), "no server")
STATUS = Feature("status", "pattern and fingerprint in /server_info", (STATE, STATE_REPLY), "a warning in the log")
ANSWERS = Feature("answers", "the fingerprint in meta_info of /generate", (STREAMER, ANSWER), "/server_info alone")
PROMETHEUS = Feature(
    "metrics", "sglang:indexcache_* in /metrics", (METRICS, COLLECTOR, FORWARD, SCHEDULER), "a warning in the log"
)
CACHE_KEYS = Feature(
    "L3 keys", "the fingerprint in the keys of HiCache storage", (STORAGE, STORAGE_CONFIG), "no server with HiCache L3"
)
PEERS = Feature(
    "P/D peers",
    "prefill and decode servers with different patterns refuse each other",
    (PEER, MEETING),
    "a warning in the log",
)
CALIBRATE = Feature(
    "calibrate",
    "switch patterns between evaluations on a live server",
    (*SERVE.needs, *PROVE.needs, CONTROL, CONTROL_REPLY, CONTROL_REQUEST, CONTROL_FAN_OUT, ROUTING, IDLE, FLUSH, HTTP),
    "no calibration server",
)
DIVERGENCE = Feature("kl", "KL to the baseline, computed in the engine", (LOGITS, LOGPROBS, REQUEST_IDS), "only nll")
SAMPLING = Feature(
    "overlap", "index overlap of the layers on a live server", (FORWARD, REQUEST_IDS, CAPTURER, CAPTURE), "not measured"
)
OBSERVE_UPDATES = Feature(
    "updates",
    "weights that are updated while a server runs are proven again, or known not to be proven",
    UPDATES[:6],
    "a warning in the log",
)
WARMED = Feature(
    "warm-up",
    "a prompt that selects is counted before a server is ready",
    (WARM_UP,),
    "the first long prompt is counted",
)
RAY = Feature("ray", "schedulers that are Ray actors and load plugins", (RAY_ACTOR,), "no server with --use-ray")
FEATURES = (
    *(SERVE, PROVE, WEIGHTS, WARMED, OBSERVE_UPDATES, STATUS, ANSWERS, PROMETHEUS, CACHE_KEYS, PEERS),
    *(CALIBRATE, DIVERGENCE, SAMPLING),
)
REQUIRED = (SERVE, PROVE, WEIGHTS)


@dataclass(frozen=True)
class SglangSource:
    """The source tree of an SGLang.

    Attributes:
        root: the folder `sglang`.
        version: as its metadata says.
    """

    root: Path
    version: str
    _trees: dict[str, ast.Module | None] = field(default_factory=dict, repr=False, compare=False)
    _lines: dict[str, list[str]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def installed(cls) -> SglangSource | None:
        """Return the SGLang that `import sglang` would take, or `None`; import nothing."""
        spec = find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return None
        try:
            number = version("sglang")
        except PackageNotFoundError:
            number = "unknown"
        return _installed(Path(next(iter(spec.submodule_search_locations))), number)

    @classmethod
    def at(cls, folder: Path) -> SglangSource:
        """Read an unpacked wheel, or a checkout's `python` folder.

        Raises:
            SglangError: if there is none.
        """
        root = folder if folder.name == "sglang" else folder / "sglang"
        if not (root / "srt").is_dir():
            raise SglangError(f"{folder}: found no sglang/srt, expected an unpacked wheel")
        metadata = sorted(root.parent.glob("sglang-*.dist-info"))
        return cls(root, metadata[0].name.removeprefix("sglang-").removesuffix(".dist-info") if metadata else "unknown")

    @classmethod
    def at_hand(cls, unpacked: Path | None) -> SglangSource | None:
        """Return an unpacked SGLang, see `at`, or without one the installed one, if there is one."""
        return cls.installed() if unpacked is None else cls.at(unpacked)

    def missing(self, need: Need) -> str | None:
        """Return one line if this SGLang lacks `need`, or `None`."""
        tree = self.tree(need.module)
        if tree is None:
            return f"needs sglang.{need.module}, which is not in SGLang {self.version}"
        node = _find(tree, need.name)
        if node is None:
            return f"needs {need.target}, which is not in SGLang {self.version}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            lacking = [name for name in need.parameters if name not in names]
            if lacking:
                return f"needs {need.target}({lacking[0]}), found ({', '.join(names)}) in SGLang {self.version}"
            rest = [f"*{item.arg}" for item in (arguments.vararg, arguments.kwarg) if item is not None]
            unknown = [name for name in (*names, *rest) if name not in ("self", *need.parameters)]
            if need.closed and unknown:
                return f"SGLang {self.version} hands {unknown[0]} to {need.target}, which this plugin does not know yet"
        mentioned = _mentioned(node) if need.mentions or need.without else set()
        lacking = [name for name in need.mentions if name not in mentioned]
        if lacking:
            return f"needs {lacking[0]} in {need.target}, which SGLang {self.version} does not have there"
        native = [name for name in need.without if name in mentioned]
        if native:
            return (
                f"SGLang {self.version} reads {native[0]} in {need.target} itself, which this plugin does not know yet"
            )
        return None

    def refusal(self, feature: Feature) -> str | None:
        """Return why this SGLang does not have `feature`: its first missing need, or `None`."""
        return next((reason for reason in map(self.missing, feature.needs) if reason is not None), None)

    def unread(self, feature: Feature) -> str | None:
        """Return one line if the source of a function that `feature` replaces is none that was read, or `None`.

        A function that is not there was not read either, unless the versions that were read lack it, too: it may have
        been moved or renamed.
        """
        for need in feature.reads:
            found = self.definition(need)
            known = READ.get(need.target, {})
            if digest(found or "") not in known:
                which = f"{need.target} as it is in SGLang {self.version}"
                if found is None:
                    which = f"what SGLang {self.version} has in the place of {need.target}"
                return (
                    f"nobody here has read {which}, and {feature.name} of this plugin replaces what it does; read:"
                    f" {', '.join(known.values()) or 'none'}"
                )
        return None

    def definition(self, need: Need) -> str | None:
        """Return the source of a function or class, decorators included, as it stands in its file; `None` without."""
        node = _find(self.tree(need.module), need.name)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return None
        first = min(item.lineno for item in (node, *node.decorator_list))
        return "\n".join(self._lines[need.module][first - 1 : node.end_lineno])

    def require(self, *features: Feature) -> None:
        """Check that this SGLang has all of `features`.

        Raises:
            SglangError: naming the first missing need.
        """
        for reason in map(self.refusal, features):
            if reason is not None:
                raise SglangError(reason)

    def tree(self, module: str) -> ast.Module | None:
        """Return the parsed source of a module, dotted below `sglang.`; `None` without one."""
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            files = (path.with_suffix(".py"), path / "__init__.py")
            source = next((file for file in files if file.is_file()), None)
            text = "" if source is None else source.read_text(encoding="utf-8")
            self._trees[module] = None if source is None else ast.parse(text)
            self._lines[module] = text.splitlines()
        return self._trees[module]


@cache
def _installed(root: Path, number: str) -> SglangSource:
    """Each file of an installed SGLang is parsed once in a process."""
    return SglangSource(root, number)


def _find(node: ast.AST | None, name: str) -> ast.AST | None:
    """Return the definition of a dotted name in a module, if there is one."""
    for part in name.split("."):
        node = next((child for child in _definitions(node) if _name(child) == part), None) if node else None
    return node


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the definitions in a module or class, also below `if` and `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign):
            yield child
        elif isinstance(child, ast.If | ast.Try):
            yield from _definitions(child)


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.AnnAssign):
        return node.target.id if isinstance(node.target, ast.Name) else None
    return getattr(node, "name", None)


def _mentioned(node: ast.AST) -> set[str]:
    words: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            words.add(child.attr)
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
            words.add(child.func.id)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            words.add(child.value)
    return words
