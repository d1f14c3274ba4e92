"""Serving a pattern in SGLang: handed over through SGLang's own configuration, proven on the loaded model.

What is hooked, and when each runs:

| hook | module | what for |
|---|---|---|
| before `ModelConfig.from_server_args` | `preflight` | what the command line must not ask for |
| before `ModelConfig.__init__` | `preflight` | the model fits; the pattern is merged into its overrides |
| after `_initialize_model`, `ModelRunner.load_model` | `proof`, `ranks` | roles and weights of each rank, all alike |
| after `Scheduler.__init__` | `metrics` | metrics, if they are on |
| after `Scheduler.get_internal_state` | here | `/server_info` |
| after `HiCacheController._generate_storage_config` | `identity` | keys of HiCache storage |
| before `CommonKVManager.__init__` | `identity` | the handshake of prefill and decode servers |

Before the two on `ModelConfig`, `load_model` and `Scheduler.__init__`, it is looked whether SGLang applied all of them.
Nothing runs in the forward pass; with metrics on, two counters are added to after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_indexcache import probes
from sglang_indexcache.pattern_file import PatternFile
from sglang_indexcache.probes import Need, SglangError, SglangSource
from sglang_indexcache.serving import identity, metrics, preflight, proof
from sglang_indexcache.serving.request import Request, refusing

logger = logging.getLogger(__name__)


def install(spec: str, allow_config_mismatch: bool = False) -> None:
    """Register the hooks that serve the pattern file `spec`; SGLang applies them before it builds anything.

    Raises:
        IndexCacheError: if the file can't be used, or this SGLang lacks what serving needs.
    """
    request = Request(spec, PatternFile.load(spec), allow_config_mismatch)
    source = SglangSource.installed()
    if source is None:
        raise SglangError("SGLang is not installed")
    for feature in probes.REQUIRED:
        reason = source.refusal(feature)
        if reason is not None:
            raise SglangError(reason)

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted: set[str] = set()

    def hook(need: Need, function: Callable[..., Any], kind: HookType) -> None:
        wanted.add(need.target)
        HookRegistry.register(need.target, refusing(function), kind)

    def all_hooks_are_in(*args: Any, **kwargs: Any) -> None:
        missing = wanted - HookRegistry._patched
        if missing:
            raise SglangError(f"SGLang did not apply the hook on {min(missing)}, so the pattern would not be proven")

    check = preflight.Preflight(request, source)
    for need in (probes.SERVER_ARGS, probes.MODEL_CONFIG, probes.LOAD_MODEL, probes.SCHEDULER):
        hook(need, all_hooks_are_in, HookType.BEFORE)
    hook(probes.SERVER_ARGS, check.server_args, HookType.BEFORE)
    hook(probes.MODEL_CONFIG, check.model_config, HookType.BEFORE)
    hook(probes.NEW_MODEL, proof.prepare, HookType.AFTER)
    hook(probes.LOAD_MODEL, proof.prover(request), HookType.AFTER)

    for feature, need, function, kind in (
        (probes.STATUS, probes.STATE, status(request), HookType.AFTER),
        (probes.PROMETHEUS, probes.SCHEDULER, metrics.reporter(request), HookType.AFTER),
        (probes.CACHE_KEYS, probes.STORAGE, identity.cache_keys(request), HookType.AFTER),
        (probes.PEERS, probes.PEER, identity.handshake(request), HookType.BEFORE),
    ):
        reason = source.refusal(feature)
        if reason is None:
            hook(need, function, kind)
        else:
            logger.warning("indexcache: no %s: %s", feature.name, reason)


def status(request: Request) -> Callable[..., None]:
    """Hook after `Scheduler.get_internal_state`: the pattern, in `/server_info` of each DP rank."""

    def after(reply: Any, *args: Any, **kwargs: Any) -> None:
        reply.internal_state["indexcache"] = request.status()

    return after
