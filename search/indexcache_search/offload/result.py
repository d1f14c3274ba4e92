"""offload.json: what was counted and predicted; the table and the page read nothing else."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table
from rich.text import Text

from indexcache_search.estimates import Estimate
from indexcache_search.report.figures import misses_figure
from sglang_indexcache.files import write_atomically

SCHEMA = "indexcache-offload/v1"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Buffer(_Section):
    """A buffer's size, what a decode step of one request misses, and what that means.

    Attributes:
        size: tokens a layer.
        times: the same in units of what a query selects.
        exposed: tokens of the layers that choose, all together.
        hidden: tokens of the layers that share.
        by_layer: tokens of each layer that chooses.
        bytes_a_step: of both.
        device_bytes: of a request's caches.
        stall_ms: what a step takes longer; `None` where bandwidth or step time are not known.
        step_ms: what it takes then.
        requests: that fit into the memory; `None` where that is not known.
        hisparse_config: for SGLang.
    """

    size: int
    times: float
    exposed: Estimate
    hidden: Estimate
    by_layer: list[float]
    bytes_a_step: float
    device_bytes: int
    stall_ms: float | None
    step_ms: float | None
    requests: int | None
    hisparse_config: str


class PlanTraffic(_Section):
    """One pattern with buffers of several sizes; `everything` are the bytes of a request whose cache is all there."""

    name: str
    pattern: str
    everything: int
    requests: int | None
    buffers: list[Buffer]


class OffloadResult(_Section):
    """Everything that was counted and predicted.

    Attributes:
        selected: tokens that a query selects.
        steps: decode steps of each sequence.
        kv_bytes: of a token and layer.
        host_bytes: of a request in host memory.
        bandwidth_gbs: from host memory to the device, and how it is known.
    """

    schema_: str = Field(alias="schema")
    model: str
    engine: str
    sequences: int
    seq_len: int
    steps: int
    selected: int
    context: int
    batch: int
    kv_bytes: int
    host_bytes: int
    bandwidth_gbs: float | None
    bandwidth_from: str | None
    step_ms: float | None
    plans: list[PlanTraffic]

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, mode="json")


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


def terminal_table(plan: PlanTraffic) -> Table:
    """One pattern for a terminal."""
    fits = "" if plan.requests is None else f"; {plan.requests} requests fit without offloading"
    table = Table(title=Text(f"{plan.name}: {plan.everything / 1e9:.3f} GB a request{fits}"))
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for buffer in plan.buffers:
        table.add_row(*map(Text, cells(buffer)))
    return table


def _with_error(estimate: Estimate) -> str:
    return f"{estimate.mean:.1f}" + ("" if estimate.stderr is None else f" ±{estimate.stderr:.1f}")


def write(result: OffloadResult, folder: Path) -> None:
    """offload.json and offload.html."""
    write_atomically(folder / "offload.json", json.dumps(result.as_json(), indent=1) + "\n")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    plans = [(plan, [cells(buffer) for buffer in plan.buffers]) for plan in result.plans]
    page = template.render(result=result, plans=plans, columns=COLUMNS, figure=misses_figure(result.plans))
    write_atomically(folder / "offload.html", page)
