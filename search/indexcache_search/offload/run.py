"""A whole count: from names of patterns to offload.json and offload.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from indexcache_search import estimates
from indexcache_search.compare.run import Runtime
from indexcache_search.data.packing import TokenReader, held_out_set
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Evaluation
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.estimates import Estimate
from indexcache_search.hf.loading import check_seq_len, describe_model, load_tokenizer, read_config, set_quiet
from indexcache_search.identity import engine_identity, engine_words, today
from indexcache_search.journal import Journal
from indexcache_search.offload import result
from indexcache_search.offload.advice import CacheBytes, KvDtype, Machine, hisparse_config, stall_ms
from indexcache_search.offload.bandwidth import measured_bandwidth
from indexcache_search.offload.counting import count_misses
from indexcache_search.offload.result import Buffer, OffloadResult, PlanTraffic
from sglang_indexcache import Pattern
from sglang_indexcache.families import family_of
from sglang_indexcache.spec import PatternSpec, split_name


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is counted.

    Attributes:
        patterns: as `spec.PatternSpec`, with `NAME=` before it if it is to have one; the checkpoint's own is always
            among them.
        sources: text.
        seq_len: tokens a sequence; `None` means 4 x `first_choice`.
        sequences: how many.
        steps: last tokens of each that count as decoded.
        buffers: sizes, in units of what a query selects.
        kv_dtype: of the cache that is served.
    """

    patterns: tuple[str, ...]
    sources: tuple[str, ...]
    seq_len: int | None
    sequences: int
    steps: int
    buffers: tuple[float, ...]
    kv_dtype: KvDtype


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is known of the machine that serves; see `advice.Machine`. `context` None means the sequences' length."""

    bandwidth_gbs: float | None
    step_ms: float | None
    batch: int
    memory_gb: float | None
    context: int | None


def run(
    model: str, asked: Asked, served: Served, runtime: Runtime, output: Path, restart: bool, console: Console
) -> OffloadResult:
    """Count what decoding would bring from host memory, and write offload.json and offload.html.

    Raises:
        IndexCacheError: if something asked for can't be done.
    """
    set_quiet()
    description, config = describe_model(model), read_config(model)
    family = family_of(description.architecture).name
    if family != "dsa":
        raise SearchError(
            f"{model} is of the family {family}; expected a DSA model, whose cache HiSparse keeps by token"
        )
    seq_len = asked.seq_len or 4 * description.first_choice
    check_seq_len(seq_len, config)
    if asked.steps > seq_len - description.first_choice:
        raise SearchError(
            f"--steps is {asked.steps}, expected at most {seq_len - description.first_choice}: up to"
            f" {description.first_choice} tokens a query selects all"
        )
    specs = [(name, PatternSpec.read(text)) for name, text in map(split_name, asked.patterns)]
    patterns = [("baseline", description.native)]
    for name, spec in specs:
        kept = "" if spec.retention is None else f" {spec.retention}"
        patterns.append((name or spec.label + kept, spec.pattern(description)))
    sizes = [round(times * description.index_topk) for times in asked.buffers]
    bytes_of = CacheBytes.of(config, asked.kv_dtype)
    reader = TokenReader(lambda: load_tokenizer(model), config.vocab_size, seq_len)
    data, _ = held_out_set(reader, description, asked.sources, seq_len=seq_len, count=asked.sequences)
    engine = TransformersEngine.load(model, runtime.device, runtime.dtype, 1, 0.0, runtime.attention)
    bandwidth, known_from = _bandwidth(served, engine)
    machine = Machine(
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
        step_ms=served.step_ms,
        batch=served.batch,
        memory=None if served.memory_gb is None else served.memory_gb * 1e9,
        context=served.context or seq_len,
    )
    identity = {**engine_identity(engine), "data": data.sha256, "steps": asked.steps, "sizes": sizes}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    plans = []
    with (
        Journal(output / "work", identity, today(), restart) as journal,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("sequences", total=len(patterns) * data.num_sequences)
        for name, pattern in patterns:
            misses = count_misses(
                engine, data, journal, pattern, sizes=sizes, steps=asked.steps, done=lambda: progress.advance(bar)
            )
            plans.append(_plan(name, pattern, misses, data, asked, sizes, bytes_of, machine, description.index_topk))
    found = OffloadResult(
        schema=result.SCHEMA,
        model=description.name,
        engine=engine_words(engine),
        sequences=data.num_sequences,
        seq_len=seq_len,
        steps=asked.steps,
        selected=description.index_topk,
        context=machine.context,
        batch=machine.batch,
        kv_bytes=bytes_of.kv,
        host_bytes=bytes_of.on_host(description.native, machine.context),
        bandwidth_gbs=bandwidth,
        bandwidth_from=known_from,
        step_ms=machine.step_ms,
        plans=plans,
    )
    result.write(found, output)
    return found


def _bandwidth(served: Served, engine: TransformersEngine) -> tuple[float | None, str | None]:
    """GB/s, and how that is known."""
    if served.bandwidth_gbs is not None:
        return served.bandwidth_gbs, "given"
    device = engine.torch_model.device
    return (measured_bandwidth(device), "measured") if device.type == "cuda" else (None, None)


def _plan(
    name: str,
    pattern: Pattern,
    misses: NDArray[np.int64],
    data: TokenSet,
    asked: Asked,
    sizes: Sequence[int],
    bytes_of: CacheBytes,
    machine: Machine,
    top_k: int,
) -> PlanTraffic:
    ends = [*pattern.full_layers, len(pattern)]
    followers = np.diff(ends) - 1  # layers that share the choice of each
    everything = bytes_of.on_device(pattern, machine.context, machine.context)
    buffers = []
    for number, (times, size) in enumerate(zip(asked.buffers, sizes, strict=True)):
        own = misses[:, number]  # [sequences, chooses]
        exposed = _a_step(own.sum(axis=1), pattern, data, asked.steps)
        hidden = _a_step((own * followers).sum(axis=1), pattern, data, asked.steps)
        by_layer = [_a_step(own[:, layer], pattern, data, asked.steps).mean for layer in range(own.shape[1])]
        stall = stall_ms(pattern, by_layer, bytes_of.kv, machine)
        held = bytes_of.on_device(pattern, size, machine.context)
        buffers.append(
            Buffer(
                size=size,
                times=times,
                exposed=exposed,
                hidden=hidden,
                by_layer=by_layer,
                bytes_a_step=(exposed.mean + hidden.mean) * bytes_of.kv,
                device_bytes=held,
                stall_ms=stall,
                step_ms=None if stall is None or machine.step_ms is None else machine.step_ms + stall,
                requests=None if machine.memory is None else int(machine.memory // held),
                hisparse_config=hisparse_config(top_k, size, machine.context),
            )
        )
    fit = None if machine.memory is None else int(machine.memory // everything)
    return PlanTraffic(name=name, pattern=pattern.roles, everything=everything, requests=fit, buffers=buffers)


def _a_step(counts: NDArray[np.int64], pattern: Pattern, data: TokenSet, steps: int) -> Estimate:
    """Mean over sources and steps of `[sequences]` counts."""
    rows, none = tuple(range(len(counts))), (0,) * len(counts)
    sums = Evaluation(pattern, rows, tuple(map(float, counts)), none, (steps,) * len(counts), none, 0.0)
    return estimates.loss(sums, data)
