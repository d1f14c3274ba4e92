"""The hooks on SGLang's pools, and what is read back of them.

| hook | what for |
|---|---|
| around `KVCacheConfigurator._build_dsa_kv_pool` | the target's pool of an engine that asks for it is being built |
| after `_should_elide_dsa_index_k` | ... and gets the list of its S layers |
| before `DefaultPoolConfigurator._compute_dsa_indexer_cell_size` | a token is counted for the layers that keep keys |
| after `ModelRunner.alloc_memory_pool` | the pool is read back, before anything is captured or served |
| after `Scheduler.get_init_info` | a scheduler is not ready without that |
| after `Scheduler.get_internal_state` | `/server_info` |

Draft models have pools of their own, which keep their keys. Each rank reads back its own pool; that ranks agree on the
number of tokens is SGLang's own doing (the least of all).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from indexcache_lab.hisparse.needs import ALLOCATES, BUILDS, COUNTS, DECIDES, FREED, POOL, unread
from indexcache_lab.hisparse.plugin import VARIABLE, asks
from sglang_indexcache.families.dsa.sglang import DsaSglang, by_configuration
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.model.name import at_revision
from sglang_indexcache.pattern import FULL
from sglang_indexcache.serving import engines
from sglang_indexcache.serving.preflight import EnginePlan, PreflightError, refused_flags
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.hooks import Hooks, bound_arguments
from sglang_indexcache.sglang.meaning import Meaning

logger = logging.getLogger(__name__)

KEY = "indexcache_keys"  # in /server_info
_REFUSED = dict.fromkeys(
    ("enable_dsa_cache_layer_split", "enable_prefill_cp", "attn_cp_size", "dcp_size"), "they were never tried together"
)
_DEVICES = ("cuda", "cpu", None)
_lock = RLock()
_applied: list[bool] = []
_building: ContextVar[bool] = ContextVar("building", default=False)


@dataclass(frozen=True)
class Keys:
    """Index keys of the target's pool on this rank, as they were read back.

    Attributes:
        layers: layers that keep them.
        freed_layers: layers that don't.
        bytes: of those that are kept.
        freed_bytes: that the others would take.
    """

    layers: int
    freed_layers: int
    bytes: int
    freed_bytes: int


@dataclass
class _Book:
    counted: int | None = None  # layers that a token was counted for
    keys: Keys | None = None


_books: WeakKeyDictionary[EnginePlan, _Book] = WeakKeyDictionary()


def prepare(server_args: Any) -> None:
    """Check that index keys can be freed in an engine that asks for it, and hook SGLang.

    Raises:
        IndexCacheError: if they can't.
    """
    plan = engines.plan_of(server_args)
    check(plan, server_args)
    with _lock:
        if not _applied:
            _hooks().apply()
            _applied.append(True)


def check(plan: EnginePlan | None, server_args: Any) -> None:
    """Check that an engine serves a pattern with HiSparse, on an SGLang that was read.

    Raises:
        IndexCacheError: naming what is missing, or in the way.
    """
    meant = Meaning(server_args)
    if plan is None or not plan.serves:
        raise PreflightError(f"{VARIABLE} is set, but the engine serves no pattern; expected one, or it unset")
    if not meant.enable_hisparse:
        raise PreflightError(
            f"{VARIABLE} is set without --enable-hisparse: SGLang itself keeps no index keys of S layers then; expected"
            " both, or neither"
        )
    for given, reason in refused_flags(_REFUSED, server_args):
        raise PreflightError(f"{given} can't be combined with {VARIABLE}: {reason}")
    if meant.device not in _DEVICES:
        raise PreflightError(f"--device {meant.device} can't be combined with {VARIABLE}: other pools; expected cuda")
    family = plan.family_at(at_revision(server_args.model_path, getattr(server_args, "revision", None)))
    if by_configuration(family.sglang) is None:
        raise PreflightError(f"{VARIABLE} is not served on {family.name}; expected a DSA model")
    plan.require(FREED, VARIABLE)
    line = None if plan.asked.allow_unread else unread(plan.sglang)
    if line is not None:
        raise PreflightError(line)


def _hooks() -> Hooks:
    hooks = Hooks()
    hooks.add("AROUND", BUILDS, build)
    hooks.add("AFTER", DECIDES, decide)
    hooks.add("BEFORE", COUNTS, count)
    hooks.add("AFTER", ALLOCATES, prove)
    hooks.add("AFTER", probes.READY, ready)
    hooks.add("AFTER", probes.STATE, status)
    return hooks


def _plan(server_args: Any) -> EnginePlan | None:
    return engines.plan_of(server_args) if asks(server_args) else None


def _book(plan: EnginePlan) -> _Book:
    return _books.setdefault(plan, _Book())


def build(original: Callable[..., Any], kvc: Any, *args: Any, **kwargs: Any) -> Any:
    """Note that the target's pool is built (around `KVCacheConfigurator._build_dsa_kv_pool`)."""
    token = _building.set(not kvc.is_draft_worker and _plan(kvc.server_args) is not None)
    try:
        return original(kvc, *args, **kwargs)
    finally:
        _building.reset(token)


def decide(result: bool, *args: Any, **kwargs: Any) -> bool | None:
    """Let the pool leave out S layers (after `_should_elide_dsa_index_k`)."""
    return True if _building.get() else None


def count(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Count a token for layers with keys (before `DefaultPoolConfigurator._compute_dsa_indexer_cell_size`).

    Under HiSparse SGLang counts as many layers as it is told.
    """
    from sglang.srt.configs.model_config import dsa_layer_skips_topk
    from sglang.srt.model_executor.pool_configurator import _get_dsa_cache_layer_ids

    bound = bound_arguments(COUNTS, args, kwargs)
    kvc, given = bound.arguments["kvc"], bound.arguments
    plan = None if kvc.is_draft_worker or given["allocate_all_layers"] else _plan(kvc.server_args)
    if plan is None:
        return None
    layers = _get_dsa_cache_layer_ids(kvc, given["num_layers"])
    given["num_layers"] = sum(not dsa_layer_skips_topk(kvc.model_config.hf_config, layer) for layer in layers)
    _book(plan).counted = given["num_layers"]
    return bound.args, bound.kwargs


def prove(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Read the target's pool back (after `ModelRunner.alloc_memory_pool`).

    Raises:
        ProofError: if it keeps other keys than F layers need, or a token was counted for other layers.
    """
    plan = None if getattr(runner, "is_draft_worker", False) else _plan(runner.server_args)
    if plan is None:
        return
    adapter, book = by_configuration(plan.family.sglang), _book(plan)
    assert adapter is not None  # `check` looked
    keys = read_back(adapter, runner)
    if book.counted != keys.layers:
        raise ProofError(
            f"a token was counted for index keys of {book.counted} layers, but {keys.layers} of the pool keep them"
        )
    book.keys = keys
    logger.info("indexcache: index keys of %d layers, none of %d", keys.layers, keys.freed_layers)


def read_back(adapter: DsaSglang, runner: Any) -> Keys:
    """Compare the index keys of a target's pool with what the loaded layers of this rank do.

    Raises:
        ProofError: if a layer that selects lacks some, or one that does not has any, or could write some.
    """
    pool, modules = runner.token_to_kv_pool, dict(adapter.modules(runner.model))
    if type(pool).__name__ != POOL:
        raise ProofError(f"the KV pool is {type(pool).__name__}, expected {POOL}")
    buffers, first = pool.index_k_with_scale_buffer, pool.start_layer
    if sorted(modules) != list(range(first, first + len(buffers))):
        raise ProofError(f"the pool has index keys for {len(buffers)} layers from {first} on, the model others")
    travelling = pool.get_state_buf_infos()[2]
    needed = runner.token_to_kv_pool_allocator.size_full // pool.page_size + 1
    kept, freed = [], 0
    for layer, module in sorted(modules.items()):
        buffer, role = buffers[layer - first], adapter.role(layer, module)
        if role == FULL and len(buffer) < needed:
            raise ProofError(f"layer {layer} is F, but has index keys for {len(buffer)} pages, expected {needed}")
        if role != FULL and len(buffer):
            raise ProofError(f"layer {layer} is {role}, but the pool keeps {len(buffer)} pages of index keys for it")
        if role != FULL and adapter.indexer(module) is not None:
            raise ProofError(f"layer {layer} is {role}, but has an indexer, which could write keys that it has not")
        if bool(travelling[layer - first]) != (role == FULL):
            raise ProofError(f"layer {layer} is {role}, but prefill and decode servers would hand over otherwise")
        kept += [buffer.nbytes] if role == FULL else []
        freed += role != FULL
    return Keys(len(kept), freed, sum(kept), freed * max(kept, default=0))


def ready(info: dict[str, Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a scheduler whose pool was not read back (after `Scheduler.get_init_info`).

    Raises:
        ProofError: if it was not.
    """
    plan = _plan(scheduler.server_args)
    if plan is not None and _book(plan).keys is None:
        raise ProofError(f"{VARIABLE} is set, but SGLang made the KV pool in another way: it was not read back")


def status(reply: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Report the keys of this rank in `/server_info` (after `Scheduler.get_internal_state`)."""
    plan = _plan(scheduler.server_args)
    keys = None if plan is None else _book(plan).keys
    if keys is not None:
        reply.internal_state[KEY] = asdict(keys)
