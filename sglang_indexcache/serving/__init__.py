"""Serving a pattern in SGLang: handed over through SGLang's own configuration, proven on the loaded model.

The hooks, and when each runs:

| hook | module | what for |
|---|---|---|
| around `Engine._launch_subprocesses` | here, `ready` | no server before every scheduler has sent its proof |
| around `Engine._launch_scheduler_processes` | here, `ready` | for a launch that loads the plugins itself |
| around `ModelConfig.from_server_args` | here, `preflight` | flags that the command line must not have |
| before `ModelConfig.__init__` | here, `preflight` | the model fits; the pattern is merged into its overrides |
| after `_initialize_model`, `ModelRunner.load_model` | `proof`, `ranks` | roles and weights of each rank, all alike |
| after `ModelRunner.init_attention_backends` | `proof`, `ranks` | of dense models, whose backend has the roles |
| after `ModelRunner.init_cuda_graphs` | `proof`, `counted` | graphs were captured with the roles; replays count |
| around `Scheduler.__init__` | `metrics` | metrics, if they are on |
| after `Scheduler.get_init_info` | `ready` | a scheduler is not ready without its proof, and sends it along |
| after `Scheduler.get_internal_state` | here | `/server_info` |
| after `SchedulerOutputStreamer.build_additional_customized_info` | here | `meta_info` of answers |
| around `kill_process_tree` | `ready` | the line of a scheduler that was refused while it served is the last |
| around `_wait_and_warmup` of HTTP servers | `warm_up` | a prompt that selects is counted before a server is ready |
| in the first passes, with module hooks of PyTorch's | `counted` | how often each indexer runs |
| around updates of weights | `updates` | proven again, or known not to be proven any more |
| after `HiCacheController._generate_storage_config` | `identity` | keys of HiCache storage |
| before `CommonKVManager.__init__` | `identity` | the handshake of prefill and decode servers |
| around `CommonKVManager.try_ensure_parallel_info` | here | decode servers outlive prefill servers of other patterns |

The first three and `Scheduler.__init__` are observed from the start (`plugin`); the others are applied once an engine
has a request. Hooks can't be taken back, and a process may have several engines: each hook looks up the plan of the
engine at hand (`engines`), and does nothing where there is none. On DSA models nothing runs in the forward pass once
indexers were counted, but for layers that select in blocks; with metrics on, two counters are added to after it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.messages import NOT_COMBINED
from sglang_indexcache.model.name import at_revision
from sglang_indexcache.serving import engines, identity, metrics, proof, ready, storage, updates, warm_up
from sglang_indexcache.serving.preflight import EnginePlan
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.hooks import Hooks, bound_arguments, bound_to, installed_source, refusing_around
from sglang_indexcache.sglang.override_flag import parse_overrides
from sglang_indexcache.sglang.read_sources import never_run
from sglang_indexcache.sglang.requested import CALIBRATION_KEY, KEY

logger = logging.getLogger(__name__)

_OBSERVED = (probes.LAUNCH, probes.SERVER_ARGS, probes.SCHEDULER, probes.START)  # the functions that `plugin` observes
_lock, _launching = RLock(), RLock()
_applied: list[bool] = []


def require() -> None:
    """Check that the installed SGLang has what serving needs, before an engine is launched.

    Raises:
        SglangError: naming what it lacks.
    """
    installed_source(probes.REQUIRED)


def follower(target: str) -> Callable[..., Any]:
    """Return the hook that runs instead of an observed function, for an engine with a request."""
    followers = {
        probes.LAUNCH.target: _launch,
        probes.SERVER_ARGS.target: _configure,
        probes.SCHEDULER.target: _schedule,
        probes.START.target: _start,
    }
    return refusing_around(followers[target])


def _launch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Launch an engine if all flags allow it, and serve nothing unproven (around `Engine._launch_subprocesses`)."""
    arguments = bound_to(original, args, kwargs).arguments
    server_args = arguments["server_args"]
    plan = _plan(server_args)
    if any(base.__module__.startswith("sglang.srt.ray.") for base in getattr(arguments.get("cls"), "__mro__", ())):
        plan.require(probes.RAY, "RayEngine")
    plan.check(server_args)
    if installed_source(probes.REQUIRED).refusal(probes.WARMED) is None:
        warm_up.hook()
    unknown = never_run(plan.sglang.version)
    if unknown is not None:
        logger.warning("indexcache: %s", unknown)
    with _launching:  # one after the other, if threads launch engines: processes get what they need by the environment
        return ready.launch(plan, server_args, lambda: original(*args, **kwargs))


def _start(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do the same around `Engine._launch_scheduler_processes`, for a launch that has loaded the plugins itself."""
    server_args = bound_to(original, args, kwargs).arguments["server_args"]
    plan = _plan(server_args)
    plan.check(server_args)
    return ready.launch_processes(plan, server_args, lambda: original(*args, **kwargs))


def _configure(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a configuration for its engine, if the flags allow it (around `ModelConfig.from_server_args`)."""
    server_args = bound_to(original, args, kwargs).arguments["server_args"]
    _plan(server_args).check(server_args)
    with engines.configuring(server_args):
        return original(*args, **kwargs)


def _schedule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let a scheduler whose model is proven report metrics, and what it serves (around `Scheduler.__init__`)."""
    plan = _plan(bound_to(original, args, kwargs).arguments["server_args"])
    original(*args, **kwargs)
    source = installed_source(probes.REQUIRED)
    if plan.serves and source.refusal(probes.PROMETHEUS) is None:
        metrics.report(plan, args[0])
    if plan.serves and source.refusal(probes.ANSWERS) is None:
        type(args[0].output_streamer).has_additional_customized_info = True


def _plan(server_args: Any) -> EnginePlan:
    plan = engines.plan_of(server_args)
    assert plan is not None  # the plugin looked
    with _lock:
        if not _applied:
            _serving_hooks().apply(*_OBSERVED)
            _applied.append(True)
    return plan


def _serving_hooks() -> Hooks:
    source, hooks = installed_source(probes.REQUIRED), Hooks()
    hooks.add("BEFORE", probes.MODEL_CONFIG, _hand_over)
    hooks.add("AFTER", probes.NEW_MODEL, _new_model)
    hooks.add("AFTER", probes.LOAD_MODEL, _prover(probes.LOAD_MODEL))
    hooks.add("AFTER", probes.READY, scheduler_ready)
    optional: list[tuple[str, probes.Need, Callable[..., Any]]] = [
        ("AFTER", probes.LOAD_BACKENDS, _prover(probes.LOAD_BACKENDS)),
        ("AFTER", probes.LOAD_GRAPHS, _captured),
        ("AROUND", probes.KILL, ready.kill),
        *(("AROUND", need, updates.around(need.name.rpartition(".")[2])) for need in probes.UPDATES),
    ]
    for kind, need, function in optional:
        if source.missing(need) is None:
            hooks.add(kind, need, function)
    for feature, kind, need, function in (
        (probes.STATUS, "AFTER", probes.STATE, status),
        (probes.ANSWERS, "AFTER", probes.ANSWER, _answers),
        (probes.CACHE_KEYS, "AFTER", probes.STORAGE, _cache_keys),
        (probes.PEERS, "BEFORE", probes.PEER, _handshake),
        (probes.PEERS, "AROUND", probes.MEETING, _meet),
    ):
        if source.refusal(feature) is None:
            hooks.add(kind, need, function)
    for feature in (probes.STATUS, probes.PROMETHEUS, probes.CACHE_KEYS, probes.PEERS, probes.OBSERVE_UPDATES):
        reason = source.refusal(feature)
        if reason is not None:
            logger.warning("indexcache: no %s: %s", feature.name, reason)
    return hooks


def _hand_over(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Merge the pattern into the overrides of a configuration (before `ModelConfig.__init__`)."""
    plan = engines.configured()
    if plan is None:
        return None
    bound = bound_arguments(probes.MODEL_CONFIG, args, kwargs)
    arguments = bound.arguments
    if arguments["is_draft_model"]:
        return None  # a NextN layer always runs its own indexer
    family = plan.family_at(at_revision(arguments["model_path"], arguments.get("revision")))
    merged = family.sglang.to_overrides(parse_overrides(arguments["model_override_args"]), plan.pattern)
    arguments["model_override_args"] = json.dumps(merged)
    engines.mark(args[0])
    return bound.args, bound.kwargs


def _new_model(model: Any, *args: Any, **kwargs: Any) -> None:
    """Meet the other ranks, and mark indexers before weights are loaded (after `_initialize_model`)."""
    plan = engines.plan_of_config(bound_arguments(probes.NEW_MODEL, args, kwargs).arguments["model_config"])
    if plan is not None:
        if not plan.serves:  # all tensor-parallel ranks attend to what the first one selects
            os.environ["SGLANG_DSA_TOPK_BROADCAST"] = "1"
        proof.prepare(plan.family.sglang, model)


def _prover(need: probes.Need) -> Callable[..., None]:
    """Return the hook after `need`, a method of `ModelRunner`: it proves the loaded model, on every rank."""

    def after(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        plan, draft = engines.plan_of_runner(runner), bool(getattr(runner, "is_draft_worker", False))
        if plan is not None:
            proof.prove(plan, runner, need)
        if not draft:
            engines.loaded_here(plan)
        counted_for = engines.plan_of(runner.server_args) if draft else plan
        if counted_for is not None and counted_for.serves and need == counted_for.family.sglang.proven_after:
            proof.count_indexers(counted_for, runner, draft)

    return after


def _captured(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Check the captured CUDA graphs (after `ModelRunner.init_cuda_graphs`)."""
    plan = engines.plan_of_runner(runner)
    if plan is not None:
        proof.check_captured(plan, runner)
        if not getattr(runner, "is_draft_worker", False):
            proof.observe_replays(plan, runner)


def scheduler_ready(info: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Send the proof of a scheduler with its readiness (after `Scheduler.get_init_info`).

    Raises:
        ProofError: if its model was not proven.
        ModelConfigError: if a search would get the digest of another model than was loaded.
    """
    plan = engines.plan_of(scheduler.server_args)
    if plan is not None:
        plan.check_loaded()
        ready.report(plan, info, scheduler)


def status(reply: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Report what was proven in `/server_info` of each DP rank (after `Scheduler.get_internal_state`).

    A calibration server says that it is one.

    Raises:
        ProofError: if its model was not proven.
    """
    plan = engines.plan_of(scheduler.server_args)
    if plan is not None and not plan.serves:
        reply.internal_state[CALIBRATION_KEY] = True
    elif plan is not None:
        found = plan.proven.status(plan.source)
        reply.internal_state[KEY] = {**found, **plan.family.sglang.saved(scheduler.tp_worker.model_runner)}


def _answers(said: dict[str, Any], streamer: Any, reqs: Sequence[Any]) -> None:
    """Say the fingerprint in answers that are complete; none while it is not proven, or SGLang's frontend is in Rust.

    Raises:
        ProofError: if its model was not proven.
    """
    plan = engines.plan_of(streamer.server_args)
    complete = [bool(request.finished()) for request in reqs]
    if plan is not None and plan.serves and any(complete) and getattr(streamer, "rust_server", None) is None:
        shown = [] if plan.proven.lost else [plan.proven.proof.pattern.fingerprint]
        said[KEY] = [shown if item else [] for item in complete]


def _cache_keys(config: Any, *args: Any, **kwargs: Any) -> None:
    """Mark the keys of HiCache storage (after `HiCacheController._generate_storage_config`).

    Storage can be attached to a running server, too.

    Raises:
        ProofError: if the keys of this storage don't show the mark.
    """
    plan = engines.plan_of_process()
    if plan is not None and plan.serves:
        identity.mark_cache_keys(plan.pattern, config)
        backend = getattr(args[0], "storage_backend_type", None)
        problem = storage.unmarked(plan.sglang, backend, getattr(config, "extra_config", None))
        if problem is not None and not plan.pattern.is_full:
            raise ProofError(f"HiCache storage {backend} {NOT_COMBINED}: {problem}")


def _handshake(*args: Any, **kwargs: Any) -> None:
    """Mark the handshake of prefill and decode servers (before `CommonKVManager.__init__`)."""
    arguments = bound_arguments(probes.PEER, args, kwargs).arguments
    plan = engines.plan_of(arguments["server_args"])
    if plan is not None and plan.serves and identity.mark_handshake(plan.pattern, arguments["args"]):
        logger.info(
            "indexcache: peers meet this server as %s: they must run its pattern", arguments["args"].kv_cache_dtype_str
        )


def _meet(original: Callable[..., Any], manager: Any, bootstrap_addr: str) -> Any:
    """Take no KV of another pattern (around `CommonKVManager.try_ensure_parallel_info`).

    SGLang ends the decode server where KV differs in its type, which is how it sees a pattern. Told that the prefill
    server does not answer, it aborts the requests that this one hands over, and serves those of others.
    """
    plan = engines.plan_of_process()
    try:
        return original(manager, bootstrap_addr)
    except RuntimeError as error:
        theirs = None if plan is None or not plan.serves else identity.of_another(plan.pattern, str(error))
        if plan is None or theirs is None:
            raise
        logger.error(
            "indexcache: the prefill server at %s runs another pattern (%s), this one %s (%s): its KV is not taken, and"
            " requests that it hands over are aborted",
            bootstrap_addr,
            theirs,
            plan.pattern,
            identity.tag(plan.pattern),
        )
        return False
