"""A whole count: from names of patterns to offload.json and offload.html."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import sglang_indexcache
from indexcache_dense.selection import Selection, selection_in
from indexcache_lab.dense import next_line
from indexcache_lab.eviction.heads import attach_saved
from indexcache_lab.offload import result
from indexcache_lab.offload.advice import (
    CacheBytes,
    hisparse_config,
    selecting_layers,
    stall_ms,
)
from indexcache_lab.offload.bandwidth import gather_bandwidth
from indexcache_lab.offload.counting import count_misses
from indexcache_lab.offload.result import Buffer, Limits, OffloadResult, PlanChoice, PlanTraffic
from indexcache_lab.offload.server import Server
from indexcache_search import demo
from indexcache_search.console import announce, bar, warn
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.settings import RunSettings
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.eval import measure
from indexcache_search.eval.held_out import ComparisonData, ComparisonSet
from indexcache_search.eval.measure import Compared
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.identity import engine_identity, engine_words, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Losses
from indexcache_search.hf.loading import check_seq_len, describe_model, load_tokenizer, read_config, set_quiet
from indexcache_search.results.names import file_names, suffix, unique_names
from indexcache_search.results.variant import NAMED, Variant
from indexcache_search.workdir.outputs import Outputs, outputs
from sglang_indexcache import ModelLayers, Pattern, PatternFile
from sglang_indexcache.families import family_of
from sglang_indexcache.http.address import Address
from sglang_indexcache.pattern import DENSE, FULL
from sglang_indexcache.pattern_file.file import ModelSection
from sglang_indexcache.pattern_file.pattern_name import PatternSpec, split_name

FAMILIES = ("dsa", "dense_gqa")
_Engine = TransformersEngine | SglangEngine


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Inputs of a count.

    Attributes:
        patterns: as of `spec.PatternSpec`, optionally with `NAME=` before it; the checkpoint's own is always counted,
            too.
        selections: of dense models; each pattern is counted with each of these, instead of its file's.
        data: held-out texts.
        steps: last tokens of each sequence, which count as decoded.
        buffers: sizes, in units of a query's selection.
        endpoints: servers in calibration mode that run a DSA model; without any it runs in this process.
        limits: limits of the plan to write; `None` writes none.
    """

    patterns: tuple[str, ...]
    selections: tuple[Selection, ...]
    data: ComparisonData
    steps: int
    buffers: tuple[float, ...]
    endpoints: tuple[Address, ...]
    limits: Limits | None


def run(
    model: str,
    asked: PlanRequest,
    server: Server,
    runtime: RunSettings,
    output: Path,
    *,
    restart: bool,
    console: Console,
) -> OffloadResult:
    """Count the traffic of decoding from host memory; write offload.json, offload.html and maybe pattern.yaml.

    Raises:
        IndexCacheError: if a request can't be fulfilled.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    set_quiet()
    reads = {"--model": [model], "--pattern": file_names(asked.patterns), "--evaluation": asked.data.sources}
    names = [*result.FILES, "pattern.yaml"]
    with outputs("indexcache-offload", output, output / "work", names, reads) as out, ExitStack() as stack:
        found, file = _run(model, asked, server, runtime, out, restart=restart, console=console, stack=stack)
        out.replace({**result.texts(found), **({} if file is None else {"pattern.yaml": file.dumps()})}, console)
    return found


def _run(
    model: str,
    asked: PlanRequest,
    server: Server,
    runtime: RunSettings,
    out: Outputs,
    *,
    restart: bool,
    console: Console,
    stack: ExitStack,
) -> tuple[OffloadResult, PatternFile | None]:
    """Return all counts, and the pattern file of the best plan; `stack` gives servers back."""
    given = asked.selections[0] if asked.selections else None
    specs = [(name, PatternSpec.read(text, given, assume=True)) for name, text in map(split_name, asked.patterns)]
    fewest = min(asked.selections, key=lambda item: item.tokens, default=None)
    description, config = describe_model(model, fewest), read_config(model)
    family = family_of(description.architecture).name
    if family not in FAMILIES:
        raise SearchError(f"{model} is of the family {family}; expected one of {', '.join(FAMILIES)}")
    if asked.endpoints and description.dense:
        raise SearchError(f"--endpoint does not run {description.architecture}; expected a DSA model")
    named = _named(specs, asked.selections, description)
    selected = [pattern.selection.tokens for pattern in named.values() if pattern.selection is not None]
    first = min([description.first_sparse_position, *selected])
    description = replace(description, first_sparse_position=first)
    seq_len = asked.data.seq_len or 4 * max([first, *selected])
    check_seq_len(seq_len, config)
    if asked.steps > seq_len - first:
        raise SearchError(
            f"--decode-steps is {asked.steps}, expected at most {seq_len - first}: up to {first} tokens"
            " a query selects all"
        )
    reader = TokenReader(lambda: load_tokenizer(model), config.vocab_size, seq_len, options=asked.data.rows)
    data = Packer(reader, description, seq_len).held_out(asked.data.sources, asked.data.sequences)
    for note in reader.notes:
        warn(console, note)
    decoded = np.broadcast_to(np.arange(seq_len) >= seq_len - asked.steps, data.tokens.shape)
    data = replace(data, scored=decoded.copy(), prompt=~decoded if description.dense else None)
    engine: _Engine
    known_from = None if server.bandwidth is None else "given"
    if asked.endpoints:
        servers = [CalibrationServer(url) for url in asked.endpoints]
        engine = SglangEngine(servers, description, notice=partial(warn, console))
        stack.callback(engine.close)
    else:
        run = replace(runtime, selection=fewest)
        engine = TransformersEngine.load(model, **run.here, notice=partial(announce, console))
        attach_saved(engine)
        device = engine.torch_model.device
        if server.bandwidth is None and device.type == "cuda":
            piece = CacheBytes.of(config, server.kv_dtype, selection_in(description.native)).piece
            server, known_from = replace(server, bandwidth=gather_bandwidth(device, piece)), "measured"
    context = server.context or seq_len
    identity = {**engine_identity(engine), "data": data.sha256}
    with Journal(out.journal(), identity, today(), restart) as journal, bar(console) as progress:
        lines = [Variant(NAMED, name, None, pattern) for name, pattern in named.items()]
        task = progress.add_task("sequences", total=3 * (1 + len(lines)) * data.num_sequences)
        done = partial(progress.advance, task)
        compared = measure.patterns(engine, journal, lines, ComparisonSet(data, {}), done)
        counter = _Counter(engine, data, journal, asked, server, context, config, partial(done, 1))
        plans = [counter.plan(item, compared[0]) for item in compared]
    found = OffloadResult(
        schema=result.SCHEMA,
        model=description.name,
        engine=engine_words(engine),
        sequences=data.num_sequences,
        seq_len=seq_len,
        steps=asked.steps,
        context=context,
        batch=server.batch,
        bandwidth_gbs=server.bandwidth,
        bandwidth_from=known_from,
        step_ms=server.step_ms,
        plans=plans,
        limits=asked.limits,
        choice=None if asked.limits is None else result.best(plans, asked.limits),
    )
    engine.check_unchanged()
    if found.choice is None:
        return found, None
    chosen = named.get(found.choice.name, description.native)
    return found, _file(chosen, found.choice, description, engine)


def _file(pattern: Pattern, choice: PlanChoice, model: ModelLayers, engine: _Engine) -> PatternFile:
    """Make the pattern file of the best plan; for dense models with the size of its buffer."""
    selection = selection_in(pattern)
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
) -> dict[str, Pattern]:
    """Return the requested patterns by name, each with all selections."""
    asked, patterns = [], []
    for name, spec in specs:
        kept, pattern = "" if spec.retention is None or name else f" {spec.retention}", spec.pattern(model)
        pattern.check_plain("is not counted yet")
        for selection in selections or (pattern.selection,):
            asked.append((name, spec, kept + suffix(selection, selections)))
            patterns.append(replace(pattern, selection=selection))
    names = [name + more for name, (_, _, more) in zip(unique_names(asked), asked, strict=True)]
    return dict(zip(names, patterns, strict=True))


@dataclass(frozen=True)
class _Counter:
    """Counter and predictor of the traffic of plans, on a server whose requests have `context` tokens."""

    engine: _Engine
    data: TokenSet
    journal: Journal
    asked: PlanRequest
    server: Server
    context: int
    config: Any
    done: Callable[[], None]

    def plan(self, line: Compared, baseline: Compared) -> PlanTraffic:
        """Count the traffic of a line's pattern, by the size of the buffer."""
        engine, data, asked, pattern = self.engine, self.data, self.asked, line.line.letters
        assert pattern is not None and line.divergence is not None
        selection = selection_in(pattern)
        selected = engine.model.index_topk if selection is None else selection.pages
        sizes = [round(times * selected) for times in asked.buffers]
        misses = count_misses(engine, data, self.journal, pattern, sizes=sizes, steps=asked.steps, done=self.done)
        size_of = CacheBytes.of(self.config, self.server.kv_dtype, selection)
        everything = size_of.on_device(pattern, self.context, self.context)
        offloads = bool(selecting_layers(pattern))
        return PlanTraffic(
            name=line.line.name,
            pattern=pattern.roles,
            selection=None if selection is None else str(selection),
            selected=selected * size_of.item,
            item=size_of.item,
            kv_bytes=size_of.kv,
            loss=estimates.increase(line.evaluation, baseline.evaluation, data),
            kl=estimates.loss(line.divergence, data),
            everything=everything,
            host_bytes=size_of.on_host(pattern, self.context),
            requests=self.server.requests(everything),
            buffers=[
                self._buffer(pattern, times, size, misses[:, number], size_of)
                for number, (times, size) in enumerate(zip(asked.buffers, sizes, strict=True))
                if offloads
            ],
        )

    def _buffer(
        self, pattern: Pattern, times: float, size: int, misses: NDArray[np.int64], size_of: CacheBytes
    ) -> Buffer:
        """Predict the traffic of one size; `misses` is `[sequences, selecting layers]`."""
        layers, server = selecting_layers(pattern), self.server
        own = np.array([pattern[layer] == FULL for layer in layers], np.int64)
        followers = np.array([pattern.source_layers.count(layer) - 1 for layer in layers], np.int64)
        exposed, hidden = self._a_step(pattern, misses @ own), self._a_step(pattern, misses @ followers)
        by_layer = {layer: self._a_step(pattern, misses[:, at]).mean for at, layer in enumerate(layers)}
        stall = stall_ms(pattern, by_layer, size_of.miss, server)
        held = size_of.on_device(pattern, size * size_of.item, self.context)
        in_sglang = DENSE not in pattern.roles and pattern.selection is None
        return Buffer(
            size=size * size_of.item,
            times=times,
            exposed=exposed,
            hidden=hidden,
            by_layer=by_layer,
            bytes_a_step=(exposed.mean + hidden.mean) * size_of.miss,
            device_bytes=held,
            stall_ms=stall,
            step_ms=None if stall is None or server.step_ms is None else server.step_ms + stall,
            requests=server.requests(held),
            hisparse_config=hisparse_config(self.engine.model.index_topk, size, self.context) if in_sglang else None,
        )

    def _a_step(self, pattern: Pattern, counts: NDArray[np.int64]) -> Estimate:
        """Return the mean over sources and steps of `[sequences]` counts; with pages, the first step copies nothing."""
        steps, rows = self.asked.steps - pattern.dense, tuple(range(len(counts)))
        sums = Losses(rows=rows, losses=tuple(counts.tolist()), tokens=(steps,) * len(counts))
        return estimates.loss(sums, self.data)


def show(found: OffloadResult, model: str | None, folder: Path, out: Console) -> None:
    """Print a table for each plan, the best plan, and the names of the files; `model` is `None` for the demo."""
    for plan in found.plans:
        for table in result.terminal_tables(plan, out.width):
            out.print(table)
    if said := result.sentence(found):
        out.print(said, soft_wrap=True)
    names = [*result.FILES, *(["pattern.yaml"] if found.choice else [])]
    out.print(f"Wrote {', '.join(str(folder / name) for name in names)}", soft_wrap=True)
    if found.choice is not None:
        path = folder / "pattern.yaml"
        out.print(next_line(PatternFile.load(path).as_pattern(), path, model or demo.MODEL), soft_wrap=True)
