"""sglang:indexcache_* in `/metrics`, with SGLang's own labels; nothing is made where metrics are off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_indexcache import probes
from sglang_indexcache.pattern import SHARED, Pattern
from sglang_indexcache.serving.proof import Asked, Proven, current_roles
from sglang_indexcache.serving.request import Request


def reporter(request: Request, asked: Asked, proven: Proven) -> Callable[..., None]:
    """Hook after `Scheduler.__init__`: make the metrics if this scheduler reports any, and count forward passes."""

    def after(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        context = scheduler.metrics_collector_context
        if not context.current_scheduler_metrics_enabled:
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        runner = scheduler.tp_worker.model_runner
        roles = list(current_roles(asked.family, runner.model).values())
        labels, shared = dict(context.collector.labels), roles.count(SHARED)
        count = make_metrics(proven.proof.pattern, request.source, labels, len(roles) - shared, shared)
        HookRegistry.register(probes.FORWARD.target, count_passes(runner, count), HookType.AFTER)
        HookRegistry.apply_hooks()

    return after


def make_metrics(
    pattern: Pattern, source: str, labels: dict[str, Any], full: int, shared: int
) -> Callable[[bool], None]:
    """Create gauges and counters for this rank's layers.

    Args:
        pattern: the one that was proven.
        source: the file that it came from.
        labels: what SGLang's own metrics on this rank are labelled with.
        full: layers on this rank that share nothing; a pipeline stage has some of the layers only.
        shared: S layers on this rank.

    Returns:
        What to call after each forward pass, with whether it decodes.
    """
    from prometheus_client import Counter, Gauge  # not before SGLang has set up its multiprocess folder

    info = Gauge(
        "sglang:indexcache_info",
        "The pattern that is served, always 1.",
        [*labels, "fingerprint", "retention", "source"],
        multiprocess_mode="mostrecent",
    )
    retention = f"{pattern.retention:.4f}"
    info.labels(**labels, fingerprint=pattern.fingerprint, retention=retention, source=source).set(1)
    layers = Gauge(
        "sglang:indexcache_layers",
        "Layers of this rank by role: F runs its indexer, D attends to everything, S reuses the last choice.",
        [*labels, "role"],
        multiprocess_mode="mostrecent",
    )
    layers.labels(**labels, role=pattern.letter).set(full)
    layers.labels(**labels, role=SHARED).set(shared)
    if pattern.selection is not None:
        steps = Counter(
            "sglang:indexcache_decode_passes", "Decode passes, whose S layers read chosen pages.", [*labels]
        )
        add_step = steps.labels(**labels).inc
        return lambda decodes: add_step() if decodes else None
    runs = Counter("sglang:indexcache_indexer_runs", "Indexer runs: F layers times forward passes.", [*labels])
    skips = Counter(
        "sglang:indexcache_indexer_skips", "Indexer runs that were saved: S layers times forward passes.", [*labels]
    )
    add_runs, add_skips = runs.labels(**labels).inc, skips.labels(**labels).inc

    def count(decodes: bool) -> None:
        add_runs(full)
        add_skips(shared)

    return count


def count_passes(runner: Any, count: Callable[[bool], None]) -> Callable[..., None]:
    """Hook after `ModelRunner.forward`, which replays of CUDA graphs go through too; idle passes have no tokens."""

    def after(result: Any, this: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        mode = forward_batch.forward_mode
        if this is runner and not mode.is_idle():
            count(bool(mode.is_decode()))

    return after
