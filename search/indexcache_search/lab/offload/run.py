"""A whole count: from names of patterns to offload.json and offload.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import sglang_indexcache
from indexcache_search.compare.run import Runtime
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.templates import RowOptions
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Losses
from indexcache_search.engines.calibration_server import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.identity import engine_identity, engine_words, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.hf.loading import check_seq_len, describe_model, load_tokenizer, read_config, set_quiet
from indexcache_search.lab.eviction.heads import attach_saved
from indexcache_search.lab.offload import page, result
from indexcache_search.lab.offload.advice import (
    CacheBytes,
    KvDtype,
    Machine,
    hisparse_config,
    selecting_layers,
    stall_ms,
)
from indexcache_search.lab.offload.bandwidth import gather_bandwidth
from indexcache_search.lab.offload.counting import count_misses
from indexcache_search.lab.offload.result import Buffer, Limits, OffloadResult, PlanChoice, PlanTraffic
from indexcache_search.lab.offload.server import Server
from indexcache_search.owned.outputs import Outputs, outputs
from indexcache_search.results.names import file_names, suffix, unique_names
from indexcache_search.search.progress import warn
from sglang_indexcache import ModelLayers, Pattern, PatternFile
from sglang_indexcache.families import family_of
from sglang_indexcache.files.pattern_file import ModelSection
from sglang_indexcache.files.spec import PatternSpec, split_name
from sglang_indexcache.http.address import Address
from sglang_indexcache.pattern import DENSE, FULL
from sglang_indexcache.pattern.selection import DEFAULT, Selection

FAMILIES = ("dsa", "dense_gqa")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Inputs of a count.

    Attributes:
        patterns: as of `spec.PatternSpec`, optionally with `NAME=` before it; the checkpoint's own is always counted,
            too.
        selections: of dense models; each pattern is counted with each of these, instead of its file's.
        sources: texts.
        rows: how rows of sources are read.
        seq_len: tokens a sequence; `None` means 4 x `first_sparse_position`.
        sequences: number of sequences.
        steps: last tokens of each sequence, which count as decoded.
        buffers: sizes, in units of a query's selection.
        kv_dtype: dtype of the served cache.
        endpoints: servers in calibration mode that run a DSA model; without any it runs in this process.
        limits: limits of the plan to write; `None` writes none.
    """

    patterns: tuple[str, ...]
    selections: tuple[Selection, ...]
    sources: tuple[str, ...]
    rows: RowOptions
    seq_len: int | None
    sequences: int
    steps: int
    buffers: tuple[float, ...]
    kv_dtype: KvDtype
    endpoints: tuple[Address, ...]
    limits: Limits | None


def run(
    model: str, asked: PlanRequest, server: Server, runtime: Runtime, output: Path, restart: bool, console: Console
) -> OffloadResult:
    """Count the traffic of decoding from host memory; write offload.json, offload.html and maybe pattern.yaml.

    Raises:
        IndexCacheError: if a request can't be fulfilled.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    set_quiet()
    reads = {"--model": [model], "--pattern": file_names(asked.patterns), "--evaluation": asked.sources}
    names = [*page.FILES, "pattern.yaml"]
    with outputs("indexcache-offload", output, output / "work", names, reads) as out:
        found, file = _run(model, asked, server, runtime, out, restart, console)
        out.replace({**page.texts(found), **({} if file is None else {"pattern.yaml": file.dumps()})}, console)
    return found


def _run(
    model: str, asked: PlanRequest, server: Server, runtime: Runtime, out: Outputs, restart: bool, console: Console
) -> tuple[OffloadResult, PatternFile | None]:
    """Return all counts, and the pattern file of the best plan."""
    given = asked.selections[0] if asked.selections else None
    specs = [(name, PatternSpec.read(text, given, DEFAULT)) for name, text in map(split_name, asked.patterns)]
    fewest = min(asked.selections, key=lambda item: item.tokens, default=None)
    description, config = describe_model(model, fewest), read_config(model)
    family = family_of(description.architecture).name
    if family not in FAMILIES:
        raise SearchError(f"{model} is of the family {family}; expected one of {', '.join(FAMILIES)}")
    if asked.endpoints and description.dense:
        raise SearchError(f"--endpoint does not run {description.architecture}; expected a DSA model")
    named = [("baseline", description.native), *_named(specs, asked.selections, description)]
    smallest = min((pattern.selection.tokens for _, pattern in named if pattern.selection), default=None)
    first_sparse_position = min(description.first_sparse_position, smallest or description.first_sparse_position)
    seq_len = asked.seq_len or 4 * first_sparse_position
    check_seq_len(seq_len, config)
    if asked.steps > seq_len - first_sparse_position:
        raise SearchError(
            f"--decode-steps is {asked.steps}, expected at most {seq_len - first_sparse_position}: up to"
            f" {first_sparse_position} tokens a query selects all"
        )
    reader = TokenReader(lambda: load_tokenizer(model), config.vocab_size, seq_len, options=asked.rows)
    counted = replace(description, first_sparse_position=first_sparse_position)
    data = Packer(reader, counted, seq_len).held_out(asked.sources, asked.sequences)
    for note in reader.notes:
        warn(console, note)
    data = _decoded(data, asked.steps, description.dense)
    engine = _engine(model, description, asked, runtime, fewest, console)
    piece = _bytes(config, asked.kv_dtype, description.native.selection).piece
    bandwidth, known_from = _bandwidth(server, engine, piece)
    machine = Machine(
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
        step_ms=server.step_ms,
        batch=server.batch,
        memory=None if server.memory_gb is None else server.memory_gb * 1e9,
        context=server.context or seq_len,
    )
    identity = {**engine_identity(engine), "data": data.sha256}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    plans = []
    with (
        Journal(out.journal(), identity, today(), restart) as journal,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("sequences", total=len(named) * data.num_sequences)
        work = _Work(engine, data, journal, asked, machine, config)
        for name, pattern in named:
            plans.append(work.plan(name, pattern, partial(progress.advance, bar)))
    found = OffloadResult(
        schema=result.SCHEMA,
        model=description.name,
        engine=engine_words(engine),
        sequences=data.num_sequences,
        seq_len=seq_len,
        steps=asked.steps,
        context=machine.context,
        batch=machine.batch,
        bandwidth_gbs=bandwidth,
        bandwidth_from=known_from,
        step_ms=machine.step_ms,
        plans=plans,
        limits=asked.limits,
        choice=None if asked.limits is None else result.best(plans, asked.limits),
    )
    engine.check_unchanged()
    if found.choice is None:
        return found, None
    [chosen] = [pattern for name, pattern in named if name == found.choice.name]
    return found, _file(chosen, found.choice, description, engine)


_Engine = TransformersEngine | SglangEngine


def _engine(
    model: str,
    description: ModelLayers,
    asked: PlanRequest,
    runtime: Runtime,
    fewest: Selection | None,
    console: Console,
) -> _Engine:
    """Return the engine that runs the model: in this process, or on servers."""
    if not asked.endpoints:
        engine = TransformersEngine.load(
            model, runtime.device, runtime.dtype, 1, runtime.prefix_cache_gb, runtime.attention, fewest
        )
        attach_saved(engine)
        return engine
    servers = [CalibrationServer(url) for url in asked.endpoints]
    return SglangEngine(servers, description, notice=partial(warn, console))


def _file(pattern: Pattern, choice: PlanChoice, model: ModelLayers, engine: _Engine) -> PatternFile:
    """Make the pattern file of the best plan; for dense models with the size of its buffer."""
    selection = pattern.selection
    if selection is not None:
        selection = replace(selection, buffer_pages=choice.buffer.size // selection.page_tokens)
    return PatternFile(
        schema="indexcache/v1",
        model=ModelSection.of(model),
        selection=selection,
        pattern=pattern.roles,
        retention=pattern.retention,
        versions={"sglang_indexcache": sglang_indexcache.__version__, "engine": engine.name},
        created=today()["created"],
    )


def _named(
    specs: Sequence[tuple[str | None, PatternSpec]], selections: Sequence[Selection], model: ModelLayers
) -> list[tuple[str, Pattern]]:
    """List the requested patterns, each with all selections.

    Raises:
        IndexCacheError: if one was made for another model, or does not fit this one, or two have one name.
    """
    found = []
    for name, spec in specs:
        kept, pattern = "" if spec.retention is None or name else f" {spec.retention}", spec.pattern(model)
        pattern.check_plain("is not counted yet")
        for selection in selections or (pattern.selection,):
            more = kept + suffix(selection, selections)
            found.append(((name, spec, more), replace(pattern, selection=selection)))
    names = unique_names([item for item, _ in found])
    return [(name + more, pattern) for name, ((_, _, more), pattern) in zip(names, found, strict=True)]


def _decoded(data: TokenSet, steps: int, dense: bool) -> TokenSet:
    """Score only the last `steps` tokens; for dense models the others are a prompt."""
    last = np.broadcast_to(np.arange(data.seq_len) >= data.seq_len - steps, data.tokens.shape)
    return replace(data, scored=last.copy(), prompt=~last if dense else None)


def _bytes(config: Any, kv_dtype: KvDtype, selection: Selection | None) -> CacheBytes:
    if selection is None:
        return CacheBytes.of_dsa(config, kv_dtype)
    return CacheBytes.of_dense(config, kv_dtype, selection)


def _bandwidth(server: Server, engine: _Engine, piece: int) -> tuple[float | None, str | None]:
    """Return GB/s, and the source of that number."""
    if server.bandwidth is not None:
        return server.bandwidth, "given"
    if isinstance(engine, SglangEngine):
        return None, None
    device = engine.torch_model.device
    return (gather_bandwidth(device, piece), "measured") if device.type == "cuda" else (None, None)


class _Work:
    """Counter and predictor for one plan after another."""

    def __init__(
        self,
        engine: _Engine,
        data: TokenSet,
        journal: Journal,
        asked: PlanRequest,
        machine: Machine,
        config: Any,
    ) -> None:
        self._engine, self._data, self._journal = engine, data, journal
        self._asked, self._machine, self._config = asked, machine, config
        self._losses = Evaluator(engine, data, "nll", journal, "nll")
        self._divergences = Evaluator(engine, data, "kl", journal, "kl")

    def plan(self, name: str, pattern: Pattern, done: Any) -> PlanTraffic:
        """Measure the loss and the traffic of `pattern`, by the size of the buffer."""
        data, selection, native = self._data, pattern.selection, self._engine.model.native
        selected = self._engine.model.index_topk if selection is None else selection.pages
        sizes = [round(times * selected) for times in self._asked.buffers]
        baseline, own = self._losses.evaluations([native, pattern])
        divergence = self._divergences.evaluations([pattern])[0]
        misses = count_misses(
            self._engine, data, self._journal, pattern, sizes=sizes, steps=self._asked.steps, done=done
        )
        size_of, machine = _bytes(self._config, self._asked.kv_dtype, selection), self._machine
        everything = size_of.on_device(pattern, machine.context, machine.context)
        times_and_sizes = list(zip(self._asked.buffers, sizes, strict=True)) if selecting_layers(pattern) else []
        return PlanTraffic(
            name=name,
            pattern=pattern.roles,
            selection=None if selection is None else str(selection),
            selected=selected * size_of.item,
            item=size_of.item,
            kv_bytes=size_of.kv,
            loss=estimates.increase(own, baseline, data),
            kl=estimates.loss(divergence, data),
            everything=everything,
            host_bytes=size_of.on_host(pattern, machine.context),
            requests=None if machine.memory is None else int(machine.memory // everything),
            buffers=[
                self._buffer(pattern, times, size, misses[:, number], size_of)
                for number, (times, size) in enumerate(times_and_sizes)
            ],
        )

    def _buffer(
        self, pattern: Pattern, times: float, size: int, misses: NDArray[np.int64], size_of: CacheBytes
    ) -> Buffer:
        """Predict the traffic of one size; `misses` is `[sequences, selecting layers]`."""
        layers, machine = selecting_layers(pattern), self._machine
        own = np.array([pattern[layer] == FULL for layer in layers], np.int64)
        followers = np.array([pattern.source_layers.count(layer) - 1 for layer in layers], np.int64)
        exposed, hidden = self._a_step(pattern, misses @ own), self._a_step(pattern, misses @ followers)
        by_layer = {layer: self._a_step(pattern, misses[:, at]).mean for at, layer in enumerate(layers)}
        stall = stall_ms(pattern, by_layer, size_of.item * size_of.kv, machine)
        held = size_of.on_device(pattern, size * size_of.item, machine.context)
        hisparse = (
            None
            if DENSE in pattern.roles or pattern.selection
            else hisparse_config(self._engine.model.index_topk, size, machine.context)
        )
        return Buffer(
            size=size * size_of.item,
            times=times,
            exposed=exposed,
            hidden=hidden,
            by_layer=by_layer,
            bytes_a_step=(exposed.mean + hidden.mean) * size_of.item * size_of.kv,
            device_bytes=held,
            stall_ms=stall,
            step_ms=None if stall is None or machine.step_ms is None else machine.step_ms + stall,
            requests=None if machine.memory is None else int(machine.memory // held),
            hisparse_config=hisparse,
        )

    def _a_step(self, pattern: Pattern, counts: NDArray[np.int64]) -> Estimate:
        """Return the mean over sources and steps of `[sequences]` counts; with pages, the first step copies nothing."""
        steps, rows = self._asked.steps - pattern.dense, tuple(range(len(counts)))
        sums = Losses(rows=rows, losses=tuple(map(float, counts)), tokens=(steps,) * len(counts))
        return estimates.loss(sums, self._data)
