"""A whole comparison: from names of patterns or servers to eval.json and eval.html."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from indexcache_search.console import announce, bar, warn
from indexcache_search.data import dry_run
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import default_reply
from indexcache_search.engines.registry import Surroundings
from indexcache_search.errors import SearchError
from indexcache_search.eval import held_out, measure, result
from indexcache_search.eval.held_out import ComparisonData, ComparisonSet
from indexcache_search.eval.job import ComparisonJob
from indexcache_search.eval.speeds import Estimates, speeds
from indexcache_search.eval.unswitched import Unswitched
from indexcache_search.evaluation.identity import engine_identity, engine_words, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.hf.loading import check_seq_len, load_tokenizer, read_config, set_quiet
from indexcache_search.results import speed_table, tables
from indexcache_search.results.pages import UNWRITTEN, pages
from indexcache_search.results.schema import ComparisonResult, SpeedRow
from indexcache_search.results.variant import Variant
from indexcache_search.workdir.outputs import Outputs, outputs
from sglang_indexcache import ModelLayers
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import ServerError
from sglang_indexcache.http.servers import reads_in_blocks
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS
from sglang_indexcache.pattern_file.pattern_name import PatternSpec, split_name


def run(job: ComparisonJob) -> ComparisonResult | None:
    """Compare on held-out data, and write eval.json and eval.html; `None` if the data are shown alone.

    Raises:
        IndexCacheError: if a request can't be fulfilled. If servers fail while they are timed, losses and the speed
            known until then are written first.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    candidates, output = job.candidates, job.output
    candidates.check()
    set_quiet()
    if pages() is None and not job.data.only_shown:
        warn(job.console, f"{result.FILES[1]} is {UNWRITTEN}")
    reads = {"--model": [job.model], **candidates.reads(), **job.data.reads()}
    with outputs(candidates.command, output, output / "work", result.FILES, reads, ever=result.ever()) as out:
        begun = _begun(job)
        if begun is None:
            return None
        failure = None
        if candidates.endpoints:
            comparison, failure = _on_servers(job, begun)
        else:
            comparison = _of_patterns(job, begun, out)
        out.replace(result.texts(comparison, candidates.figures(comparison)), job.console)
    if failure is not None:
        raise SearchError(f"{failure}; what was measured before is in {output / result.FILES[0]}")
    return comparison


@dataclass(frozen=True)
class _Begun:
    """A comparison whose data are read; `lines` are patterns, `estimates` their speeds, if asked for."""

    model: ModelLayers
    lines: Sequence[Variant]
    built: ComparisonSet
    estimates: Estimates | None


def _begun(job: ComparisonJob) -> _Begun | None:
    """Read the model's configuration, the patterns and the data."""
    candidates, data, speed, console = job.candidates, job.data, job.speed, job.console
    given = candidates.selections[0] if candidates.selections else None
    specs = [(name, PatternSpec.read(text, given, assume=True)) for name, text in map(split_name, candidates.patterns)]
    description, config = candidates.describe(job.model, specs, data.seq_len), read_config(job.model)
    lines = candidates.lines(specs, description)
    seq_len = data.seq_len or 4 * max(description.first_sparse_position, *map(_selected, lines), 0)
    check_seq_len(seq_len, config)
    _warn_of_whole(lines, seq_len, console)
    estimates: Estimates | None = None
    if speed is not None:
        if (found := speeds()) is None:
            raise SearchError("--speed needs an extension that is not installed")
        if not candidates.endpoints:
            estimates = found.estimates(description, speed, partial(warn, console))
        elif not data.only_shown:
            found.check(candidates.endpoints, speed)
    data = _with_reply(data, lines, seq_len, job)
    reader = TokenReader(lambda: load_tokenizer(job.model), config.vocab_size, seq_len, description.dense, data.rows)
    built = held_out.build(reader, description, data, seq_len, candidates.calibrated_on(specs))
    if data.only_shown:
        dry_run.show(reader, {"evaluation": built.data})
        return None
    for note in reader.notes:
        warn(console, note)
    if built.left_out:
        warn(console, f"left out {built.left_out} documents that a {candidates.noun} was calibrated on")
    return _Begun(description, lines, built, estimates)


def _on_servers(job: ComparisonJob, begun: _Begun) -> tuple[ComparisonResult, IndexCacheError | None]:
    """Return what was measured until servers failed that were timed, and that failure."""
    addresses, data, speed = job.candidates.endpoints, begun.built.data, job.speed
    rows: list[SpeedRow] = []
    failure = None
    with bar(job.console) as progress:
        unswitched = Unswitched(addresses, partial(warn, job.console))
        task = progress.add_task("servers", total=len(addresses) * data.num_sequences)
        compared = measure.servers(addresses, begun.built, partial(progress.advance, task))
        unswitched.check()
        if speed is not None and (timer := speeds()) is not None:
            task = progress.add_task("speed", total=len(speed.loads))
            lines, done = [line.line for line in compared], partial(progress.advance, task)
            try:
                for found in timer.timed(addresses, lines, speed, pool=data.tokens.ravel(), done=done):
                    unswitched.check()
                    rows += found
            except IndexCacheError as error:
                failure = error
    names = ", ".join(map(str, addresses))
    return result.collect(compared, begun.built, begun.model, engine=names, speed=rows), failure


def _of_patterns(job: ComparisonJob, begun: _Begun, out: Outputs) -> ComparisonResult:
    candidates, model, say = job.candidates, begun.model, partial(warn, job.console)
    with bar(job.console) as progress, ExitStack() as stack:
        distinct = len({model.native, *(line.pattern for line in begun.lines)})
        task = progress.add_task(f"{candidates.noun}s", total=2 * distinct * begun.built.data.num_sequences)
        run = replace(job.run, selection=model.native.selection)
        around = Surroundings(announce=partial(announce, job.console), warn=say)
        engine = stack.enter_context(candidates.engine(job.model, run, model, around))
        engine.model = model
        names = {**engine_identity(engine), "held-out": begun.built.data.sha256}
        with Journal(out.journal(), names, today(), job.restart, candidates.parse) as journal:
            compared = candidates.compared(engine, journal, begun.lines, begun.built, partial(progress.advance, task))
        engine.check_unchanged()
        return result.collect(
            compared,
            begun.built,
            model,
            engine=engine_words(engine),
            speed=[] if begun.estimates is None else begun.estimates([line.line for line in compared]),
            prices=candidates.prices(model, say, None if job.speed is None else job.speed.prices),
        )


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


def _in_blocks(address: Address) -> bool:
    try:
        return reads_in_blocks(address.without("/v1"))
    except ServerError:  # another program's; who needs it to answer says so
        return False


def _with_reply(data: ComparisonData, lines: Sequence[Variant], seq_len: int, job: ComparisonJob) -> ComparisonData:
    """Return `data` with a reply, if a pattern or a server needs one and has none: a quarter of each sequence.

    Of servers that select in blocks it is no more than what they read query by query of a prompt.

    Raises:
        SearchError: if the reply of such a server is longer than that.
    """
    blocks = any(line.letters is not None and line.letters.indexers for line in lines)
    servers = [address.label for address in job.candidates.endpoints if _in_blocks(address)]
    if servers and data.reply is not None and data.reply > EXACT_ROWS:
        raise SearchError(
            f"--reply is {data.reply}, but {servers[0]} selects for blocks of queries in all but the last {EXACT_ROWS}"
            f" tokens that it reads; expected at most {EXACT_ROWS}"
        )
    if data.reply is not None or not (blocks or servers):
        return data
    reply = min(default_reply(seq_len), EXACT_ROWS) if servers else default_reply(seq_len)
    who = f"{servers[0]} selects" if servers else "layers select"
    counted = f"the last {reply} tokens of a sequence count (--reply {reply})"
    warn(job.console, f"{who} for blocks of queries: {counted}")
    return replace(data, reply=reply)


def show(comparison: ComparisonResult, output: Path, out: Console) -> None:
    """Print the tables, the findings, and the names of the files."""
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
    written = result.FILES if pages() is not None else result.FILES[:1]
    out.print(f"Wrote {', '.join(str(output / name) for name in written)}", soft_wrap=True)
