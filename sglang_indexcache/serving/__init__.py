"""Serving a pattern in SGLang: handed over through SGLang's own configuration, proven on the loaded model.

What is hooked, and when each runs:

| hook | module | what for |
|---|---|---|
| before `ModelConfig.from_server_args` | `preflight` | what the command line must not ask for |
| before `ModelConfig.__init__` | `preflight` | the model fits; the pattern is merged into its overrides |
| before `Engine._launch_subprocesses` | `ready` | the pattern travels with the server arguments |
| after `_initialize_model`, `ModelRunner.load_model` | `proof`, `ranks` | roles and weights of each rank, all alike |
| after `ModelRunner.init_attention_backends` | `proof`, `ranks` | the same of dense models: its backend has the roles |
| after `ModelRunner.init_cuda_graphs` | `proof` | of dense models: each graph was captured with the roles |
| after `Scheduler.__init__` | `metrics` | metrics, if they are on |
| after `Scheduler.get_init_info` | `ready` | a scheduler is not ready without its proof, and sends it along |
| after `Engine._launch_subprocesses` | `ready` | no server before every scheduler has sent its proof |
| after `Scheduler.get_internal_state` | here | `/server_info` |
| after `HiCacheController._generate_storage_config` | `identity` | keys of HiCache storage |
| before `CommonKVManager.__init__` | `identity` | the handshake of prefill and decode servers |

Before the two on `ModelConfig`, `load_model` and `Scheduler.__init__`, it is looked whether SGLang applied all of them.
On DSA models nothing runs in the forward pass, but for layers that score less than everything; with metrics on, two
counters are added to after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_indexcache import probes
from sglang_indexcache.hooks import Hooks, installed_source, refusing
from sglang_indexcache.serving import identity, metrics, preflight, proof, ready
from sglang_indexcache.serving.proof import Proven
from sglang_indexcache.serving.request import KEY, Request

logger = logging.getLogger(__name__)


def install(spec: str, allow_config_mismatch: bool = False) -> None:
    """Register the hooks that serve the pattern file `spec`; SGLang applies them before it builds anything.

    Raises:
        IndexCacheError: if the file can't be used, or this SGLang lacks what serving needs.
    """
    _register(Request.load(spec, allow_config_mismatch), Proven())


def install_carried(overrides: str) -> Callable[..., None]:
    """Do the same for a pattern that came with the server arguments, before a process builds its scheduler.

    Args:
        overrides: `--json-model-override-args` of the server.

    Returns:
        The hook after `Scheduler.__init__`, which is hooked already.

    Raises:
        IndexCacheError: as `install`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    request, proven = Request.from_overrides(overrides), Proven()
    check = _register(request, proven)
    HookRegistry.apply_hooks()
    return refusing(metrics.reporter(request, check, proven))


def _register(request: Request, proven: Proven) -> preflight.Preflight:
    """Register all hooks; what is returned knows the model's family, once SGLang has read its configuration."""
    source = installed_source(probes.REQUIRED)
    hooks, check = Hooks(), preflight.Preflight(request, source)
    hooks.guard(probes.SERVER_ARGS, probes.MODEL_CONFIG, probes.LOAD_MODEL, probes.READY, probes.LAUNCH)
    hooks.before(probes.SERVER_ARGS, check.server_args)
    hooks.before(probes.MODEL_CONFIG, check.model_config)
    hooks.before(probes.LAUNCH, ready.carrier(request))
    hooks.after(probes.NEW_MODEL, proof.preparer(check))
    for need in (probes.LOAD_MODEL, probes.LOAD_BACKENDS):
        if source.missing(need) is None:
            hooks.after(need, proof.prover(check, proven, need))
    if source.missing(probes.LOAD_GRAPHS) is None:
        hooks.after(probes.LOAD_GRAPHS, proof.captured(check))
    hooks.after(probes.READY, ready.reporter(request, proven))
    hooks.after(probes.LAUNCH, ready.gate(request))
    for feature, register, need, function in (
        (probes.STATUS, hooks.after, probes.STATE, status(request, proven)),
        (probes.PROMETHEUS, hooks.after, probes.SCHEDULER, metrics.reporter(request, check, proven)),
        (probes.CACHE_KEYS, hooks.after, probes.STORAGE, identity.cache_keys(request)),
        (probes.PEERS, hooks.before, probes.PEER, identity.handshake(request)),
    ):
        reason = source.refusal(feature)
        if reason is None:
            register(need, function)
        else:
            logger.warning("indexcache: no %s: %s", feature.name, reason)
    return check


def status(request: Request, proven: Proven) -> Callable[..., None]:
    """Hook after `Scheduler.get_internal_state`: what was proven, in `/server_info` of each DP rank."""

    def after(reply: Any, *args: Any, **kwargs: Any) -> None:
        reply.internal_state[KEY] = proven.proof.status(request.source)

    return after
