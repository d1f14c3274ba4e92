"""The metrics sglang:indexcache_* in `/metrics`, with SGLang's own labels; none are made where metrics are off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_indexcache.pattern import SHARED, Pattern
from sglang_indexcache.serving.preflight import EnginePlan
from sglang_indexcache.serving.proof import current_roles
from sglang_indexcache.serving.proven import Passes
from sglang_indexcache.sglang.hooks import refusing


def report(plan: EnginePlan, scheduler: Any) -> None:
    """Make the metrics if this scheduler reports any, and count its forward passes (after `Scheduler.__init__`).

    `/server_info` says how many there were, too: without metrics nothing is counted.
    """
    context = scheduler.metrics_collector_context
    if not context.current_scheduler_metrics_enabled:
        return
    runner = scheduler.tp_worker.model_runner
    roles = list(current_roles(plan.family.sglang, runner.model).values())
    labels, proven = dict(context.collector.labels), plan.proven
    add, proven.tell = _make_metrics(proven.proof.pattern, plan.source, labels, roles)
    proven.passes = passes = Passes()

    def count(decodes: bool) -> None:
        passes.total += 1
        passes.decode += decodes
        add(decodes)

    runner.forward = counted(runner.forward, count)


def _make_metrics(
    pattern: Pattern, source: str, labels: dict[str, Any], roles: list[str]
) -> tuple[Callable[[bool], None], Callable[[bool], None]]:
    """Create the metrics of this rank's layers; return what to call after a pass, and when the proof holds or not."""
    from prometheus_client import Counter, Gauge  # not before SGLang has set up its multiprocess folder

    info = Gauge(
        "sglang:indexcache_info",
        "The pattern that is served: 1, or 0 while that is not proven any more.",
        [*labels, "fingerprint", "retention", "source"],
        multiprocess_mode="mostrecent",
    )
    retention = f"{pattern.retention:.4f}"
    served = info.labels(**labels, fingerprint=pattern.fingerprint, retention=retention, source=source)
    served.set(1)
    layers = Gauge(
        "sglang:indexcache_layers",
        "Layers of this rank by role: F selects (with an indexer, or pages), D attends to everything, S reuses the last"
        " selection.",
        [*labels, "role"],
        multiprocess_mode="mostrecent",
    )
    full, shared = roles.count(pattern.full_role), roles.count(SHARED)
    for role in dict.fromkeys((pattern.full_role, SHARED, *roles)):
        layers.labels(**labels, role=role).set(roles.count(role))
    if pattern.dense:
        steps = Counter(
            "sglang:indexcache_decode_passes", "Decode passes, whose F and S layers read chosen pages.", [*labels]
        )
        add_step = steps.labels(**labels).inc
        return lambda decodes: add_step() if decodes else None, served.set
    runs = Counter("sglang:indexcache_indexer_runs", "Indexer runs: F layers times forward passes.", [*labels])
    skips = Counter(
        "sglang:indexcache_indexer_skips", "Indexer runs that were saved: S layers times forward passes.", [*labels]
    )
    add_runs, add_skips = runs.labels(**labels).inc, skips.labels(**labels).inc

    def count(decodes: bool) -> None:
        add_runs(full)
        add_skips(shared)

    return count, served.set


def counted(forward: Callable[..., Any], count: Callable[[bool], None]) -> Callable[..., Any]:
    """Count the passes of a `ModelRunner.forward`, replays of CUDA graphs included; idle passes have no tokens."""
    count = refusing(count)

    @functools.wraps(forward)
    def counting(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        result, mode = forward(forward_batch, *args, **kwargs), forward_batch.forward_mode
        if not mode.is_idle():
            count(bool(mode.is_decode()))
        return result

    return counting
