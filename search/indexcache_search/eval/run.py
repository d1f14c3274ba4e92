"""A whole comparison: from names of patterns or servers to eval.json and eval.html."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from indexcache_search.data import dry_run
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.sketch import Sketch
from indexcache_search.data.templates import AS_THEY_ARE, RowOptions
from indexcache_search.data.tokens import default_reply
from indexcache_search.errors import SearchError
from indexcache_search.eval import held_out, measure, result
from indexcache_search.eval.candidates import Candidates
from indexcache_search.eval.held_out import ComparisonSet
from indexcache_search.eval.measure import Compared
from indexcache_search.eval.speed import servers
from indexcache_search.eval.speed.estimate import estimated, prices_at
from indexcache_search.eval.speed.turns import Load
from indexcache_search.evaluation.identity import engine_identity, engine_words, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.hf.loading import check_seq_len, load_tokenizer, read_config, set_quiet
from indexcache_search.results.held_out import ComparisonResult, SpeedRow
from indexcache_search.results.variant import Variant
from indexcache_search.searching.progress import announce, bar, warn
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.workdir.outputs import Outputs, outputs
from sglang_indexcache import ModelLayers
from sglang_indexcache.http.address import Address
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.pattern_file.spec import PatternSpec, split_name


@dataclass(frozen=True, kw_only=True)
class ComparisonData:
    """ComparisonData of a comparison, see `held_out.build`. `seq_len` None means 4 x what a query selects.

    `rows` says how rows are read. With `only_shown` the data are printed and nothing is compared.
    """

    sources: tuple[str, ...]
    seq_len: int | None
    sequences: int
    tasks: tuple[str, ...] = ()
    haystack: str = "demo:text"
    samples: int = 16
    chat: bool = False
    reply: int | None = None
    rows: RowOptions = AS_THEY_ARE
    only_shown: bool = False

    def reads(self) -> dict[str, Sequence[str]]:
        """Return the inputs by option, for `check_apart`."""
        return {"--evaluation": self.sources, "--tasks haystack": [self.haystack]}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How patterns run; see `TransformersEngine.load`."""

    device: str
    dtype: str
    batch_size: int
    prefix_cache_gb: float
    attention: str


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """Prompts whose speed is compared: measured on servers, estimated for patterns.

    Attributes:
        contexts: tokens of a prompt.
        output_tokens: see `Load`, like `turns`.
        concurrency: requests at once, beside one at a time.
        prices: name or file of the price table of estimates; the model's by default.
    """

    contexts: tuple[int, ...]
    output_tokens: int = 64
    turns: int = 5
    concurrency: int = 1
    prices: str | None = None

    def loads(self) -> list[Load]:
        """Return what servers are given to do, one after the other."""
        return [
            Load(context=context, concurrency=number, output_tokens=self.output_tokens, turns=self.turns)
            for context in self.contexts
            for number in dict.fromkeys((1, self.concurrency))
        ]


def run(
    model: str,
    candidates: Candidates,
    data: ComparisonData,
    runtime: Runtime,
    output: Path,
    restart: bool,
    console: Console,
    speed: SpeedOptions | None = None,
) -> ComparisonResult | None:
    """Compare on held-out data, and write eval.json and eval.html.

    Args:
        model: folder or hub id; with servers only its tokenizer and config.json are read.
        candidates: patterns or servers to compare.
        data: the held-out data.
        runtime: how patterns are evaluated.
        output: folder of the results and the journal.
        restart: discard the journal first.
        console: for messages.
        speed: what to compare beside losses.

    Raises:
        IndexCacheError: if a request can't be fulfilled. If servers fail while they are timed, losses and the speed
            known until then are written first.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    candidates.check()
    set_quiet()
    reads = {"--model": [model], **candidates.reads(), **data.reads()}
    with outputs(candidates.command, output, output / "work", result.FILES, reads, ever=result.EVER) as out:
        comparison, failure = _run(model, candidates, data, runtime, out, restart, console, speed)
        if comparison is not None:
            out.replace(result.texts(comparison, candidates.figures(comparison)), console)
    if failure is not None:
        raise SearchError(f"{failure}; what was measured before is in {output / result.FILES[0]}")
    return comparison


def _run(
    model: str,
    candidates: Candidates,
    data: ComparisonData,
    runtime: Runtime,
    out: Outputs,
    restart: bool,
    console: Console,
    speed: SpeedOptions | None,
) -> tuple[ComparisonResult | None, IndexCacheError | None]:
    given = candidates.selections[0] if candidates.selections else None
    specs = [(name, PatternSpec.read(text, given, assume=True)) for name, text in map(split_name, candidates.patterns)]
    description, config = candidates.describe(model, specs, data.seq_len), read_config(model)
    lines = candidates.lines(specs, description)
    seq_len = data.seq_len or 4 * max(description.first_sparse_position, *map(_selected, lines), 0)
    check_seq_len(seq_len, config)
    _warn_of_whole(lines, seq_len, console)
    speed_prices: list[Prices] = []
    if speed is not None and candidates.endpoints:
        if not data.only_shown:
            servers.check(candidates.endpoints, speed.loads())
    elif speed is not None:
        speed_prices = prices_at(description, speed.contexts, speed.prices)
        for unlike in dict.fromkeys(prices.unlike for prices in speed_prices if prices.unlike):
            warn(console, f"--speed: reckoned as {speed_prices[0].table}, which this model is not: {unlike}")
    data = _with_reply(data, lines, seq_len, console)
    calibrated = candidates.calibrated_on(specs)
    built = built_of(model, description, config.vocab_size, data, seq_len, calibrated, candidates.noun, console)
    if data.only_shown:
        return None, None
    number = built.data.num_sequences
    speeds: list[SpeedRow] = []
    failure = None
    with bar(console) as progress:
        if candidates.endpoints:
            task = progress.add_task("servers", total=len(candidates.endpoints) * number)
            compared = measure.servers(candidates.endpoints, built, partial(progress.advance, task))
            engine = ", ".join(map(str, candidates.endpoints))
            if speed is not None:
                task = progress.add_task("speed", total=len(speed.loads()))
                try:
                    for rows in _timed(candidates.endpoints, compared, speed, built, partial(progress.advance, task)):
                        speeds += rows
                except IndexCacheError as error:
                    failure = error
        else:
            distinct = len({description.native, *(line.pattern for line in lines)})
            task = progress.add_task(f"{candidates.noun}s", total=2 * distinct * number)
            loaded = candidates.engine.load(
                model,
                runtime.device,
                runtime.dtype,
                runtime.batch_size,
                runtime.prefix_cache_gb,
                runtime.attention,
                description.native.selection,
                partial(announce, console),
            )
            loaded.model, engine = description, engine_words(loaded)
            identity = {**engine_identity(loaded), "held-out": built.data.sha256}
            with Journal(out.journal(), identity, today(), restart, loaded.parse) as journal:
                done = partial(progress.advance, task)
                compared = candidates.compared(loaded, journal, lines, built, done)
            loaded.check_unchanged()
            speeds = estimated([line.row.line for line in compared], speed_prices)
    prices = None
    if not candidates.endpoints:
        prices = candidates.prices(description, partial(warn, console), None if speed is None else speed.prices)
    comparison = result.collect(
        compared,
        built,
        description.first_sparse_position,
        model=description.name,
        engine=engine,
        seq_len=seq_len,
        prices=None if candidates.endpoints else prices,
        speed=speeds,
    )
    return comparison, failure


def _timed(
    addresses: Sequence[Address],
    compared: Sequence[Compared],
    speed: SpeedOptions,
    built: ComparisonSet,
    done: Callable[[], None],
) -> Iterator[list[SpeedRow]]:
    """Time servers with prompts of the held-out data's tokens; see `servers.measure`."""
    lines = [line.row.line for line in compared]
    return servers.measure(addresses, lines, speed.loads(), built.data.tokens.ravel(), done)


def _selected(line: Variant) -> int:
    """Return how many tokens a query selects by the line's own selection, 0 without one."""
    selection = None if line.letters is None else line.letters.selection
    return 0 if selection is None else selection.tokens


def _warn_of_whole(lines: Sequence[Variant], seq_len: int, console: Console) -> None:
    """Say which selections hold a whole sequence."""
    whole = sorted({size for size in map(_selected, lines) if size >= seq_len})
    if whole:
        sizes = ", ".join(map(str, whole))
        warn(console, f"selections of {sizes} tokens hold whole sequences of {seq_len}: expected a larger --seq-len")


def _with_reply(data: ComparisonData, lines: Sequence[Variant], seq_len: int, console: Console) -> ComparisonData:
    """Return `data` with a reply, a quarter of each sequence as in a search, if a pattern needs one and has none."""
    blocks = any(line.letters is not None and line.letters.indexers for line in lines)
    if not blocks or data.reply is not None:
        return data
    reply = default_reply(seq_len)
    warn(console, f"layers select for blocks of queries: the last {reply} tokens of a sequence count (--reply {reply})")
    return replace(data, reply=reply)


def built_of(
    model: str,
    description: ModelLayers,
    vocab_size: int,
    data: ComparisonData,
    seq_len: int,
    calibrated: Sequence[Sketch],
    what: str,
    console: Console,
) -> ComparisonSet:
    """Build the held-out data without texts that a `what` was calibrated on; see `held_out.build`."""
    replies = description.dense
    reader = TokenReader(lambda: load_tokenizer(model), vocab_size, seq_len, replies, data.rows)
    built = held_out.build(
        reader,
        description,
        data.sources,
        data.tasks,
        data.haystack,
        seq_len=seq_len,
        sequences=data.sequences,
        samples=data.samples,
        chat=data.chat,
        calibrated=calibrated,
        reply=data.reply,
    )
    if data.only_shown:
        dry_run.show(reader, {"evaluation": built.data})
        return built
    for note in reader.notes:
        warn(console, note)
    if built.left_out:
        warn(console, f"left out {built.left_out} documents that a {what} was calibrated on")
    return built


def show(comparison: ComparisonResult, output: Path, out: Console) -> None:
    """Print the tables, the findings, and the names of the files."""
    from indexcache_search.results import speed_table, tables

    for table in tables.terminal_tables(comparison.held_out, out.width):
        out.print(table)
    if line := tables.speed_line(comparison.held_out):
        out.print(line, soft_wrap=True)
    for table in speed_table.terminal_tables(comparison.speed, comparison.held_out, out.width):
        out.print(table)
    for table in result.task_tables(comparison, out.width):
        out.print(table)
    for line in comparison.findings:
        out.print(line, soft_wrap=True)
    out.print(f"Wrote {output / 'eval.json'}, {output / 'eval.html'}", soft_wrap=True)
