"""The hooks that let C4 layers of SGLang select in blocks, and what is read back of them.

| hook | what for |
|---|---|
| after `ModelRunner.init_cuda_graphs` | what selects in blocks is put on the target's attention backend |
| after `Scheduler.get_init_info` | a scheduler is not ready without that |
| after `Scheduler.get_internal_state` | `/server_info` |
"""

from __future__ import annotations

from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from indexcache_lab.v4_blocks import check_queries
from indexcache_lab.v4_blocks.needs import BLOCKS, unread
from indexcache_lab.v4_blocks.plugin import VARIABLE, asked
from indexcache_lab.v4_blocks.selection import METHOD, EntryBlocks, placed
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.model.name import at_revision
from sglang_indexcache.pattern import FULL, Pattern
from sglang_indexcache.serving import engines
from sglang_indexcache.serving.preflight import EnginePlan, PreflightError, refused_flags
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.hooks import Hooks
from sglang_indexcache.sglang.meaning import DISABLED, Meaning, is_off

KEY = "indexcache_v4_blocks"  # in /server_info
_REFUSED = {
    **dict.fromkeys(
        ("enable_prefill_cp", "attn_cp_size", "dcp_size", "enable_hisparse", "enable_two_batch_overlap"),
        "its rows are others, and it was never tried",
    ),
    "enable_deepseek_v4_fp4_indexer": "a leader is the mean of queries in fp8, never of packed ones",
    "enable_return_indexer_topk": "it would have a row for each block",
    "hicache_storage_backend": "its keys don't say which layers select in blocks",
}
_DEVICES = ("cuda", "cpu", None)
_lock = RLock()
_applied: list[bool] = []
_standing: WeakKeyDictionary[EnginePlan, tuple[Any, EntryBlocks]] = WeakKeyDictionary()


def prepare(server_args: Any) -> None:
    """Check that layers can select in blocks in an engine that asks for it, and hook SGLang.

    Raises:
        IndexCacheError: if they can't.
    """
    check(engines.plan_of(server_args), server_args)
    with _lock:
        if not _applied:
            hooks = Hooks()
            hooks.add("AFTER", probes.LOAD_GRAPHS, place)
            hooks.add("AFTER", probes.READY, ready)
            hooks.add("AFTER", probes.STATE, status)
            hooks.apply()
            _applied.append(True)


def check(plan: EnginePlan | None, server_args: Any) -> None:
    """Check that an engine serves a pattern of DeepSeek-V4 with nothing in the way, on an SGLang that was read.

    Raises:
        IndexCacheError: naming what is missing, or in the way.
    """
    if plan is None or not plan.serves:
        raise PreflightError(f"{VARIABLE} is set, but the engine serves no pattern; expected one, or it unset")
    meant = Meaning(server_args)
    for given, reason in refused_flags(_REFUSED, server_args):
        raise PreflightError(f"{given} can't be combined with {VARIABLE}: {reason}")
    if not is_off(meant.disaggregation_mode):
        raise PreflightError(
            f"--disaggregation-mode can't be combined with {VARIABLE}: the other side does not know of blocks"
        )
    if meant.cuda_graph_backend_prefill not in (None, DISABLED):
        raise PreflightError(f"graphs of prompts can't be combined with {VARIABLE}: they would hold one layout of rows")
    if meant.device not in _DEVICES:
        raise PreflightError(f"--device {meant.device} can't be combined with {VARIABLE}; expected cuda")
    family = plan.family_at(at_revision(server_args.model_path, getattr(server_args, "revision", None)))
    if family is not DEEPSEEK_V4:
        raise PreflightError(f"{VARIABLE} is not served on {family.name}, expected DeepSeek-V4; DSA models have blocks")
    blocks_of(plan.pattern, asked(server_args))
    plan.require(BLOCKS, VARIABLE)
    line = None if plan.asked.allow_unread else unread(plan.sglang)
    if line is not None:
        raise PreflightError(line)


def blocks_of(pattern: Pattern, text: str) -> Pattern:
    """Return a pattern with the blocks of a text as `0q4+2q16`.

    Raises:
        PatternError: if it is none, or a letter of it is not F.
    """
    return Pattern.parse(f"{pattern.roles}+{text}")


def _plan(server_args: Any) -> EnginePlan | None:
    return engines.plan_of(server_args) if asked(server_args) else None


def place(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Let layers of a target model select in blocks (after `ModelRunner.init_cuda_graphs`).

    Raises:
        ProofError: if a layer has no indexer that runs, or the attention backend is of another kind.
        PatternError: if a block does not fit the model.
    """
    plan = None if getattr(runner, "is_draft_worker", False) else _plan(runner.server_args)
    if plan is None:
        return
    backend, queries, here = runner.attn_backend, dict[int, int](), dict(DEEPSEEK_V4.sglang.modules(runner.model))
    for item in blocks_of(plan.pattern, asked(runner.server_args)).indexers:
        module = here.get(item.layer)
        if module is None:  # another pipeline stage's
            continue
        check_queries(item.queries, module.index_topk, runner.model.config.sliding_window)
        if DEEPSEEK_V4.sglang.role(item.layer, module) != FULL:
            raise ProofError(f"letter {item.layer} should select in blocks, but its indexer does not run")
        queries[module.layer_id] = item.queries
    if not hasattr(type(backend), METHOD):
        raise ProofError(f"the attention backend is {type(backend).__name__}, expected one with {METHOD}")
    if placed(backend) is None:  # graphs are captured again after an update
        _standing[plan] = backend, EntryBlocks(backend, queries)


def standing(plan: EnginePlan) -> EntryBlocks:
    """Return what selects in blocks in this process.

    Raises:
        ProofError: if nothing does, or something has replaced it.
    """
    backend, found = _standing.get(plan, (None, None))
    if found is None or placed(backend) is not found:
        raise ProofError(f"{VARIABLE} is set, but nothing selects in blocks: SGLang made its backend in another way")
    return found


def ready(info: dict[str, Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a scheduler whose layers would select for each query (after `Scheduler.get_init_info`).

    Raises:
        ProofError: if they would.
    """
    plan = _plan(scheduler.server_args)
    if plan is not None:
        standing(plan)


def status(reply: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Report the blocks of this rank in `/server_info` (after `Scheduler.get_internal_state`)."""
    plan = _plan(scheduler.server_args)
    if plan is not None:
        found = standing(plan)
        layers = {str(layer): count for layer, count in found.queries.items()}
        reply.internal_state[KEY] = {"layers": layers, "passes": found.passes, "blocks": found.blocks}
