"""Content of offload.json: counts and predictions. The tables and the page, offload.html, read nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

import jinja2
from markupsafe import Markup
from pydantic import Field
from rich.table import Table

from indexcache_report.drawing import GREY, blank, plain, svg
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results.schema import ResultSection
from indexcache_search.results.tables import fitted, with_error

SCHEMA = "indexcache-offload/v2"
FILES = ("offload.json", "offload.html")


class Buffer(ResultSection):
    """Size of a buffer, and the misses of one request's decode step.

    Attributes:
        size: tokens a layer.
        times: the size in units of a query's selection.
        exposed: items (tokens, for dense models pages) of all layers that wait for their own selection.
        hidden: items of the layers that share a selection.
        by_layer: items of each selecting layer.
        bytes_a_step: bytes of exposed and hidden items.
        device_bytes: bytes of a request's caches on the device.
        stall_ms: added time of a step; `None` if bandwidth or step time are unknown.
        step_ms: time of a step with that.
        requests: number that fits into the memory; `None` if that is unknown.
        hisparse_config: for SGLang, whose HiSparse does not run dense models.
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


class PlanTraffic(ResultSection):
    """One pattern with buffers of several sizes.

    Attributes:
        selection: for dense models, in one word.
        selected: tokens that a query selects.
        item: tokens that are copied together.
        kv_bytes: bytes of a token in a layer.
        loss: increase over the baseline's on the decoded tokens, in nats.
        kl: divergence of the baseline to this, on the same tokens.
        everything: bytes of a request with all of its cache on the device.
        host_bytes: bytes of a request in host memory.
        requests: number that fits without offloading.
        buffers: empty if every layer attends to everything.
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


class Limits(ResultSection):
    """Limits of a plan's bytes: copied in a step, and held on the device; `None` for no limit."""

    bytes_a_step: float | None
    device_bytes: float | None


class PlanChoice(ResultSection):
    """The plan of least KL within the limits, and the smallest of its buffers that fits."""

    name: str
    buffer: Buffer


class OffloadResult(ResultSection):
    """All counts and predictions.

    Attributes:
        steps: decode steps of each sequence.
        bandwidth_gbs: from host memory to the device; `bandwidth_from` names its source.
        limits: the requested limits, if any.
        choice: the best plan within them, if any.
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
    choice: PlanChoice | None


def best(plans: Sequence[PlanTraffic], limits: Limits) -> PlanChoice | None:
    """Return the offloaded plan of least KL with a buffer within `limits`, and its smallest such buffer."""
    most, room = limits.bytes_a_step, limits.device_bytes
    within = [
        (plan.kl.mean, buffer.device_bytes, PlanChoice(name=plan.name, buffer=buffer))
        for plan in plans
        for buffer in plan.buffers
        if (most is None or buffer.bytes_a_step <= most) and (room is None or buffer.device_bytes <= room)
    ]
    return min(within, key=lambda item: item[:2])[2] if within else None


def sentence(result: OffloadResult) -> str | None:
    """Describe the best plan within the limits; `None` if no limits were requested."""
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
    """Return a buffer's cells, in the order of `COLUMNS`."""
    return [
        f"{buffer.times:g}x",
        str(buffer.size),
        with_error(buffer.exposed, ".1f"),
        with_error(buffer.hidden, ".1f"),
        f"{buffer.bytes_a_step / 1e6:.3f}",
        f"{buffer.device_bytes / 1e9:.3f}",
        "" if buffer.stall_ms is None else f"{buffer.stall_ms:.3g}",
        "" if buffer.step_ms is None else f"{buffer.step_ms:.4g}",
        "" if buffer.requests is None else str(buffer.requests),
    ]


def heading(plan: PlanTraffic) -> str:
    """Describe a pattern without offloading."""
    fits = "" if plan.requests is None else f"; {plan.requests} requests fit without offloading"
    loss = f"loss {with_error(plan.loss, '+.4f')}, KL {with_error(plan.kl, '.4f')}"
    return f"{plan.name}: {loss}; {plan.everything / 1e9:.3f} GB a request{fits}"


def terminal_tables(plan: PlanTraffic, width: int) -> list[Table]:
    """Make the table of one pattern for a terminal of `width` columns."""
    return fitted(heading(plan), [COLUMNS, *map(cells, plan.buffers)], 1, width)


def texts(result: OffloadResult) -> dict[str, str]:
    """Render the contents of `FILES`, by name."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    plans = [(plan, heading(plan), [cells(buffer) for buffer in plan.buffers]) for plan in result.plans]
    page = template.render(
        result=result, plans=plans, columns=COLUMNS, sentence=sentence(result), figure=misses_figure(result.plans)
    )
    return dict(
        zip(FILES, (json.dumps(result.model_dump(by_alias=True, mode="json"), indent=1) + "\n", page), strict=True)
    )


def misses_figure(plans: Sequence[PlanTraffic]) -> Markup:
    """Draw the tokens copied in a request's decode step over the size of the buffer: all, and the exposed ones."""
    figure, axes = blank(8, 3.6)
    for number, plan in enumerate(plan for plan in plans if plan.buffers):
        times = [buffer.times for buffer in plan.buffers]
        everything = [buffer.bytes_a_step / plan.kv_bytes for buffer in plan.buffers]
        exposed = [
            tokens * buffer.exposed.mean / max(buffer.exposed.mean + buffer.hidden.mean, 1e-9)
            for tokens, buffer in zip(everything, plan.buffers, strict=True)
        ]
        colour = f"C{number}"
        axes.plot(times, everything, color=colour, marker="o", markersize=4, linewidth=1.2, label=plain(plan.name))
        axes.plot(times, exposed, color=colour, marker="o", markersize=3, linewidth=1.0, linestyle="--")
    axes.plot([], [], color=GREY, linestyle="--", label="of these, exposed")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("buffer, in units of what a query selects")
    axes.set_ylabel("tokens a step, all layers")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure, "Items copied in a decoding step over the size of the buffer")
