"""Run a whole search: from a model's name and data sources to its files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from indexcache_search.console import command, serving
from indexcache_search.data import dry_run
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.templates import AS_THEY_ARE, RowOptions
from indexcache_search.data.tokens import TokenSet, default_reply
from indexcache_search.engines.base import Engine
from indexcache_search.engines.calibration_server import CalibrationServer
from indexcache_search.engines.own_server import own_server
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.hf.loading import check_seq_len, describe_model, load_tokenizer, read_config, set_quiet
from indexcache_search.results import speed_table, tables
from indexcache_search.results.held_out import SearchResult, SpeedRow
from indexcache_search.results.variant import BASELINE
from indexcache_search.results.words import counted, serving_flags
from indexcache_search.searching import metrics, model_card
from indexcache_search.searching.comparison import comparison_lines, evaluated
from indexcache_search.searching.estimate import MINUTE, Estimate, size_of
from indexcache_search.searching.estimate import estimate as estimate_of
from indexcache_search.searching.matrices import Matrices
from indexcache_search.searching.pattern_writer import FileWriter
from indexcache_search.searching.progress import SearchProgress, announce, warn
from indexcache_search.searching.prompt_times import PromptTimes
from indexcache_search.searching.search import Found, Listeners, Search
from indexcache_search.searching.settings import Settings
from indexcache_search.strategies import DEFAULT_RETAIN, measured_strategies
from indexcache_search.strategies.base import Goal, Step, TimeGoal
from indexcache_search.strategies.budget.pricing import column
from indexcache_search.workdir.outputs import PARTIAL, SERVER_LOG, Outputs, outputs
from sglang_indexcache import ModelLayers
from sglang_indexcache.command_line import error_context
from sglang_indexcache.families import family_of
from sglang_indexcache.http.address import Address
from sglang_indexcache.io.redaction import redacted
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.pattern.selection import PatternSelection
from sglang_indexcache.pattern_file.result_folder import CARD, FILES, METRICS, PATTERN, REPORT, SEARCH


@dataclass(frozen=True, kw_only=True)
class SearchData:
    """Sources and sizes of the calibration and the held-out set; `seq_len` None means 4 x `first_sparse_position`.

    `seed` decides the order of the calibration data. `reply`, see `TokenSet.ending_in_replies`; `None` if all tokens
    count that sources let count. `rows` says how rows are understood.
    """

    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]
    seq_len: int | None
    num_sequences: int
    num_eval_sequences: int
    seed: int = 0
    reply: int | None = None
    rows: RowOptions = AS_THEY_ARE


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine runs, see `TransformersEngine.load` and `SglangEngine`.

    Attributes:
        engine: `transformers` or `sglang`.
        endpoints: SGLang servers in calibration mode; without any, one is started.
        server_arguments: SGLang's own flags for that one.
        selection: of dense models, what patterns select; by default the paper's.
    """

    engine: str
    device: str
    dtype: str | None
    batch_size: int
    prefix_cache_gb: float
    attention: str
    endpoints: tuple[Address, ...] = ()
    server_arguments: tuple[str, ...] = ()
    selection: PatternSelection | None = None

    @property
    def server_flags(self) -> tuple[str, ...]:
        """Flags of the search's own server, `device` and `dtype` included."""
        device = () if self.device == "auto" else ("--device", self.device)
        dtype = () if self.dtype is None else ("--dtype", self.dtype)
        return (*device, *dtype, *self.server_arguments)


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where results and journal go; `restart` discards the journal first."""

    folder: Path
    work_dir: Path
    restart: bool


def run(
    model: str,
    data: SearchData,
    runtime: EngineSettings,
    settings: Settings,
    files: Files,
    console: Console,
    command: str | None = None,
) -> SearchResult:
    """Search `model`, write pattern.yaml, metrics.json, report.html and README.md, and return what they show.

    `command` is the command line, for README.md.

    Raises:
        IndexCacheError: if a request can't be met.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    with _begun(model, data, runtime, settings, files, console) as begun:
        engine, goal, calibration, held_out = begun.engine, begun.goal, begun.calibration, begun.held_out
        journal, out = begun.journal, begun.out
        if isinstance(goal.plan, TimeGoal) and (unlike := goal.plan.prices.unlike):
            warn(console, f"--prefill: reckoned as {goal.plan.prices.table}, which this model is not: {unlike}")
        with SearchProgress(console) as progress:
            chooses = Evaluator(engine, calibration, settings.objective, journal, "calibration", progress.evaluated)
            judges = Evaluator(engine, held_out, "nll", journal, "held-out", progress.evaluated)
            writer = FileWriter(engine, chooses, data.seed, journal.facts["created"])
            matrices = Matrices(engine, calibration, journal)
            search = Search(engine, chooses, settings.strategy, goal, matrices.measured)
            times = PromptTimes(engine, held_out, journal)
            result = _search(search, judges, writer, matrices, times, out, progress)
        result = result.model_copy(update={"command": command})
        from indexcache_search.report.search import render  # matplotlib takes a second to import

        named = ModelName.parse(model)
        pages = {
            PATTERN: result.pattern_file.dumps(),
            METRICS: json.dumps(result.as_json(), indent=1) + "\n",
            REPORT: render(result),
            CARD: model_card.render(result, named.repository if named.folder is None else None),
        }
        out.replace(pages, console)
    return result


@dataclass(frozen=True)
class _Begun:
    """A search whose model is loaded, and whose journal is open."""

    engine: Engine
    goal: Goal
    calibration: TokenSet
    held_out: TokenSet
    journal: Journal
    out: Outputs


@contextmanager
def _begun(
    model: str, data: SearchData, runtime: EngineSettings, settings: Settings, files: Files, console: Console
) -> Iterator[_Begun]:
    """Read the data, load the model and open the journal, for as long as the `with` block runs."""
    reads = {"--model": [model], "--calibration": data.calibration, "--evaluation": data.evaluation}
    with ExitStack() as stack:
        out = stack.enter_context(outputs(SEARCH, files.folder, files.work_dir, FILES, reads))
        with console.status(Text(f"Loading {redacted(model)}")):
            with error_context("reading the data"):
                goal, reader, calibration, held_out = _load_data(model, data, settings, runtime)
            with error_context("loading the model"):
                engine = _load_engine(model, runtime, out, stack, console)
        for note in reader.notes:
            warn(console, note)
        names = identity(engine, calibration, held_out, settings.objective)
        journal = stack.enter_context(Journal(out.journal(), names, today(), files.restart))
        yield _Begun(engine, goal, calibration, held_out, journal, out)


def estimate(
    model: str,
    data: SearchData,
    runtime: EngineSettings,
    settings: Settings,
    files: Files,
    console: Console,
    seconds: float = MINUTE,
) -> Estimate:
    """Run the first minute of a search, which its journal keeps, and estimate what all of it takes.

    Raises:
        IndexCacheError: as `run`.
    """
    with _begun(model, data, runtime, settings, files, console) as begun, error_context("measuring the first minute"):
        loading = time.time() - psutil.Process().create_time()
        with console.status(Text(f"Measuring for {seconds:.0f} seconds")):
            return estimate_of(
                begun.engine,
                begun.calibration,
                begun.held_out,
                settings.objective,
                settings.strategy,
                begun.goal,
                begun.journal,
                Matrices(begun.engine, begun.calibration, begun.journal).measured,
                loading,
                size_of(model),
                seconds,
            )


def show_data(model: str, data: SearchData, runtime: EngineSettings, settings: Settings) -> None:
    """Read the data as `run` does, print what was read, and do nothing else.

    Raises:
        IndexCacheError: as `run`.
    """
    with error_context("reading the data"):
        _, reader, calibration, held_out = _load_data(model, data, settings, runtime)
    dry_run.show(reader, {"evaluation": held_out, "calibration": calibration})


def _load_data(
    model: str, data: SearchData, settings: Settings, runtime: EngineSettings
) -> tuple[Goal, TokenReader, TokenSet, TokenSet]:
    """Read the data before the weights: mistakes in the first are common, and the second takes long."""
    set_quiet()
    description = describe_model(model, runtime.selection)
    if runtime.engine == "sglang" and not family_of(description.architecture).sglang.calibrated:
        raise SearchError(f"--engine sglang does not search {description.architecture}; expected transformers")
    goal = settings.goal(description)
    seq_len = data.seq_len or 4 * description.first_sparse_position
    if isinstance(goal.plan, TimeGoal) and data.reply is None:
        data = replace(data, reply=default_reply(seq_len))
    return goal, *token_sets(model, description, data, seq_len)


def token_sets(
    model: str, description: ModelLayers, data: SearchData, seq_len: int
) -> tuple[TokenReader, TokenSet, TokenSet]:
    """Read the calibration and the held-out set of sequences of `seq_len` tokens; the reader has notes about both.

    Raises:
        IndexCacheError: if a source can't be read or holds too little, or the model takes no such sequences.
    """
    config = read_config(model)
    check_seq_len(seq_len, config)
    replies = description.dense
    reader = TokenReader(lambda: load_tokenizer(model), config.vocab_size, seq_len, replies, data.rows)
    packer = Packer(reader, description, seq_len)
    held_out = packer.held_out(data.evaluation, data.num_eval_sequences, data.calibration)
    calibration = packer.collect(data.calibration, data.num_sequences, data.seed, "calibration")
    if data.reply is not None:
        calibration, held_out = calibration.ending_in_replies(data.reply), held_out.ending_in_replies(data.reply)
    return reader, calibration, held_out


def _load_engine(model: str, runtime: EngineSettings, out: Outputs, stack: ExitStack, console: Console) -> Engine:
    """Load weights here, or find or start servers that have; `stack` ends what was started."""
    if runtime.engine == "transformers":
        from indexcache_search.engines.transformers import TransformersEngine  # takes seconds to import

        return TransformersEngine.load(
            model,
            runtime.device,
            runtime.dtype or "float32",
            runtime.batch_size,
            runtime.prefix_cache_gb,
            runtime.attention,
            runtime.selection,
            partial(announce, console),
        )
    servers = [CalibrationServer(url) for url in runtime.endpoints]
    if not servers:
        log = out.work.growing(SERVER_LOG)
        own = own_server(model, runtime.server_flags, log, partial(announce, console))
        servers = [stack.enter_context(own)]
    engine = SglangEngine(servers, describe_model(model), runtime.batch_size, notice=lambda line: warn(console, line))
    stack.callback(engine.close)
    return engine


def _search(
    search: Search,
    judges: Evaluator,
    writer: FileWriter,
    matrices: Matrices,
    times: PromptTimes,
    out: Outputs,
    progress: SearchProgress,
) -> SearchResult:
    """Run the phases of a search; write down the patterns that are found on the way."""
    engine, goal = search.engine, search.goal
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.monotonic()
        with error_context(name):
            yield
        seconds[name] = time.monotonic() - began

    def on_step(step: Step, found: Found) -> None:
        out.work.write(PARTIAL, writer.file(found, step.pattern).dumps())
        progress.committed(step, len(found.steps), len(goal.native.full_layers) - goal.fewest)

    def on_pattern(retention: Fraction, found: Found) -> None:
        out.work.write(PARTIAL, writer.file(found, next(iter(found.patterns.values()))).dumps())
        share = sum(map(float, found.patterns)) / sum(map(float, goal.full_layers))
        progress.found(retention, found.patterns[retention], share)

    with timed("search"):
        progress.begin(f"{search.strategy.name} search", search.planned_sequences(), search.data)
        found = search.find(Listeners(on_step, on_pattern, progress.notice))
    with timed("overlap and similarity"):
        progress.wait("what layers have in common")
        rules = measured_strategies(engine.model.dense)
        measured = {name: matrices.measured(name) for name in ("overlap", *(rule.name for rule in rules))}
        lines = comparison_lines(found, goal.native, measured)
    for look_alike in found.look_alikes:
        progress.warn(str(look_alike))
    with timed("held-out comparison"):
        distinct = len({line.pattern for line in lines})
        progress.begin("held-out comparison", distinct * judges.data.num_sequences, judges.data)
        rows = []
        for row in evaluated(lines, judges):
            rows.append(row)
            progress.compared(row, rows[0])
    speed: list[SpeedRow] = []
    if times.known:
        with timed("times of prompts"):
            progress.wait("times of prompts")
            chosen = [line for line in lines if line.kind == BASELINE or line.name == found.strategy.name]
            speed = times.measured(chosen)
    with error_context("looking whether the model is still the same"):
        engine.check_unchanged()
    file = writer.file(found, found.plan or found.patterns[next(iter(goal.full_layers))], goal.plan)
    prices = goal.plan.prices if isinstance(goal.plan, TimeGoal) else column(engine.model, progress.warn)
    table = metrics.held_out(rows, judges.data, engine.model.first_sparse_position, prices)
    return metrics.collect(found, file, engine, table, measured, seconds, speed)


def show(result: SearchResult, model: str | None, files: Files, out: Console) -> None:
    """Print the comparison, the patterns found, where the files are, and what to do next.

    Args:
        result: what was found.
        model: folder or hub id; `None` for the demo.
        files: where it is.
        out: for results.
    """
    held_out, search, cost = result.held_out, result.pattern_file.search, result.cost
    assert search is not None
    for table in tables.terminal_tables(held_out, out.width):
        out.print(table)
    for row in model_card.found_rows(result):
        out.print(f"{row.retention or row.name.rpartition(' ')[2]:>4}  {row.pattern}", soft_wrap=True)
    if line := tables.speed_line(held_out):
        out.print(line, soft_wrap=True)
    for table in speed_table.terminal_tables(result.speed, held_out, out.width):
        out.print(table)
    out.print(
        f"Cost: {counted(search.evaluations, 'pattern')} beside the baseline, {cost.sequences} runs of a sequence,"
        f" {cost.share_of_algorithm_1:.1%} of the layer-tokens of Algorithm 1",
        soft_wrap=True,
    )
    out.print(f"Wrote {', '.join(str(files.folder / name) for name in FILES)}", soft_wrap=True)
    path = files.folder / PATTERN
    if model is None:
        shares = ",".join(dict.fromkeys(row.retention for row in model_card.found_rows(result) if row.retention))
        asked = () if shares in ("", DEFAULT_RETAIN) else ("--retain", shares)
        out.print(f"Next: {command('indexcache-eval', '--pattern', path, *asked)}", soft_wrap=True)
        return
    advised = f"{path}{model_card.suffix(result)}"
    out.print(f"Next: {command('indexcache-check', advised, '--model', model)}", soft_wrap=True)
    flags = serving_flags(result.pattern_file.selection)
    out.print(f"      {serving(advised, model, *flags)}", soft_wrap=True)
