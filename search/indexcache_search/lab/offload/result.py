"""offload.json: what was counted and predicted; the table and the page read nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results.tables import fitted

SCHEMA = "indexcache-offload/v2"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Buffer(_Section):
    """A buffer's size, what a decode step of one request misses, and what that means.

    Attributes:
        size: tokens a layer.
        times: the same in units of what a query selects.
        exposed: items (tokens, of dense models pages) of the layers that wait for what they choose, all together.
        hidden: items of the layers that share.
        by_layer: items of each layer that chooses.
        bytes_a_step: of both.
        device_bytes: of a request's caches.
        stall_ms: what a step takes longer; `None` where bandwidth or step time are not known.
        step_ms: what it takes then.
        requests: that fit into the memory; `None` where that is not known.
        hisparse_config: for SGLang, whose HiSparse runs no dense models.
    """

    size: int
    times: float
    exposed: Estimate
    hidden: Estimate
    by_layer: dict[int, float]
    bytes_a_step: float
    device_bytes: int
    stall_ms: float | None
    step_ms: float | None
    requests: int | None
    hisparse_config: str | None


class PlanTraffic(_Section):
    """One pattern with buffers of several sizes.

    Attributes:
        selection: of dense models, all of it in one word.
        selected: tokens that a query selects.
        item: tokens that travel together.
        kv_bytes: of a token and layer.
        loss: more than the baseline's on the decoded tokens, in nats.
        kl: of the baseline to this, likewise.
        everything: bytes of a request whose cache is all on the device.
        host_bytes: of a request in host memory.
        requests: that fit without offloading.
        buffers: none where every layer attends to everything.
    """

    name: str
    pattern: str
    selection: str | None
    selected: int
    item: int
    kv_bytes: int
    loss: Estimate
    kl: Estimate
    everything: int
    host_bytes: int
    requests: int | None
    buffers: list[Buffer]


class Limits(_Section):
    """What a plan may bring in a step, and hold on the device, in bytes; `None` for no limit."""

    bytes_a_step: float | None
    device_bytes: float | None


class Choice(_Section):
    """The plan of least KL within the limits, and the smallest of its buffers that is within them."""

    name: str
    buffer: Buffer


class OffloadResult(_Section):
    """Everything that was counted and predicted.

    Attributes:
        steps: decode steps of each sequence.
        bandwidth_gbs: from host memory to the device, and how it is known.
        limits: what was asked for, if anything was.
        choice: what is best within them, if anything is.
    """

    schema_: str = Field(alias="schema")
    model: str
    engine: str
    sequences: int
    seq_len: int
    steps: int
    context: int
    batch: int
    bandwidth_gbs: float | None
    bandwidth_from: str | None
    step_ms: float | None
    plans: list[PlanTraffic]
    limits: Limits | None
    choice: Choice | None

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, mode="json")


def best(plans: Sequence[PlanTraffic], limits: Limits) -> Choice | None:
    """Of the plans that are offloaded, the one of least KL that has a buffer within `limits`, and its smallest such."""
    most, room = limits.bytes_a_step, limits.device_bytes
    within = [
        (plan.kl.mean, buffer.device_bytes, Choice(name=plan.name, buffer=buffer))
        for plan in plans
        for buffer in plan.buffers
        if (most is None or buffer.bytes_a_step <= most) and (room is None or buffer.device_bytes <= room)
    ]
    return min(within, key=lambda item: item[:2])[2] if within else None


def sentence(result: OffloadResult) -> str | None:
    """What is best within the limits, for people; `None` where nobody asked."""
    if result.limits is None:
        return None
    if result.choice is None:
        least = min((b.bytes_a_step for plan in result.plans for b in plan.buffers), default=0.0)
        return f"nothing is within the limits; the least that a step brings is {least / 1e6:.3f} MB"
    name, buffer = result.choice.name, result.choice.buffer
    return (
        f"least KL within the limits: {name}, buffer {buffer.times:g}x: {buffer.bytes_a_step / 1e6:.3f} MB a step,"
        f" {buffer.device_bytes / 1e9:.3f} GB a request"
    )


COLUMNS = ("buffer", "tokens", "exposed", "hidden", "MB a step", "GB a request", "stall ms", "step ms", "requests")


def cells(buffer: Buffer) -> list[str]:
    """A buffer's texts, in the order of `COLUMNS`."""
    return [
        f"{buffer.times:g}x",
        str(buffer.size),
        _with_error(buffer.exposed),
        _with_error(buffer.hidden),
        f"{buffer.bytes_a_step / 1e6:.3f}",
        f"{buffer.device_bytes / 1e9:.3f}",
        "" if buffer.stall_ms is None else f"{buffer.stall_ms:.3g}",
        "" if buffer.step_ms is None else f"{buffer.step_ms:.4g}",
        "" if buffer.requests is None else str(buffer.requests),
    ]


def heading(plan: PlanTraffic) -> str:
    """What a pattern is without offloading."""
    fits = "" if plan.requests is None else f"; {plan.requests} requests fit without offloading"
    loss = f"loss {_with_error(plan.loss, '+.4f')}, KL {_with_error(plan.kl, '.4f')}"
    return f"{plan.name}: {loss}; {plan.everything / 1e9:.3f} GB a request{fits}"


def terminal_tables(plan: PlanTraffic, width: int) -> list[Table]:
    """One pattern for a terminal of `width` columns."""
    return fitted(heading(plan), [COLUMNS, *map(cells, plan.buffers)], 1, width)


def _with_error(estimate: Estimate, form: str = ".1f") -> str:
    error = "" if estimate.stderr is None else f" ±{format(estimate.stderr, form.lstrip('+'))}"
    return format(estimate.mean, form) + error
