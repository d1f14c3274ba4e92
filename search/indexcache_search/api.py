"""Search, compare and try patterns from Python; the commands do the same, and read each other's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexcache_search.console import messages
from indexcache_search.data import COMPARED, JUDGED, SEARCHED, SEARCHED_IN_TIME
from indexcache_search.data.packing import Wish
from indexcache_search.data.templates import AS_THEY_ARE, RowOptions
from indexcache_search.engines.settings import RunSettings
from indexcache_search.errors import SearchError
from indexcache_search.eval.candidates import Candidates
from indexcache_search.eval.held_out import ComparisonData
from indexcache_search.eval.job import ComparisonJob
from indexcache_search.eval.speeds import SpeedOptions
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.results.schema import ComparisonResult, SearchResult
from indexcache_search.searching.job import Files, SearchData, SearchJob
from indexcache_search.searching.settings import BLOCKS, Budget, Settings, TimeBudget
from indexcache_search.strategies import DEFAULT_RETAIN, DEFAULT_STRATEGY, strategies, strategy_of
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe, family_of_modules
from sglang_indexcache.http.address import Address
from sglang_indexcache.pattern import parse_retention
from sglang_indexcache.pattern_file.pattern_name import PatternSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

Source = str | Path
"""A file, a folder, a hub id, or `demo:NAME`."""
Retentions = str | Fraction | Sequence[str | Fraction]
"""Shares of the layers that stay F: `"1/4"`, `"1/2,1/4"` or `[Fraction(1, 4)]`."""


def search(
    *,
    model: Source,
    calibration: Source | Sequence[Source],
    output: str | Path,
    evaluation: Source | Sequence[Source] | None = None,
    retain: Retentions = DEFAULT_RETAIN,
    strategy: str = DEFAULT_STRATEGY,
    strategy_settings: Mapping[str, Any] | None = None,
    objective: Objective = "kl",
    prefill: Budget | None = None,
    decode: Budget | None = None,
    queries: Sequence[int] = BLOCKS,
    seq_len: int | None = None,
    num_sequences: int | None = None,
    num_eval_sequences: int | None = None,
    reply: int | None = None,
    rows: RowOptions = AS_THEY_ARE,
    seed: int = 0,
    run: RunSettings | None = None,
    work_dir: str | Path | None = None,
    restart: bool = False,
    progress: bool = False,
) -> SearchResult:
    """Find which layers of a model can share what they attend to, as `indexcache-search` does.

    A search that was interrupted goes on where it was if it is called again with the same `output`.

    Args:
        model: folder or hub id.
        calibration: sources of text that chooses.
        output: folder of pattern.yaml, metrics.json, report.html and README.md.
        evaluation: sources of text that judges; by default set aside from `calibration`.
        retain: shares of the layers that stay F; the first is the pattern file's default.
        strategy: name of a strategy, see docs/reference/strategies.md.
        strategy_settings: its settings, such as `{"swaps": 2}`.
        objective: what is minimised: `kl`, nats a token from the model that shares nothing, or `nll`, loss in nats.
        prefill: share of the prefill time that a pattern with blocks of queries may take.
        decode: share of a decoding step's time that such a pattern may take.
        queries: sizes of its blocks.
        seq_len: tokens of a sequence; by default 4 times what a query selects.
        num_sequences: sequences that choose; by default 32, of which a source may have fewer.
        num_eval_sequences: sequences that judge, likewise.
        reply: tokens at the end of a sequence that alone count; what is before them is the prompt.
        rows: how rows of sources are read.
        seed: order of the calibration data.
        run: engine, device, dtype and batch size; by default float32 on the best device here.
        work_dir: folder of the journal; by default `output/work`.
        restart: forget what an earlier search found.
        progress: print progress and messages to stderr.

    Returns:
        What metrics.json holds: the pattern file, losses in nats a token with their intervals (95 %), matrices
        `[layers, layers]` and costs.

    Raises:
        IndexCacheError: if a request can't be met; one line says what was found and what was expected.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    from indexcache_search.searching.run import run as run_job

    if strategy not in strategies():
        raise SearchError(f"strategy is {strategy!r}, expected one of {', '.join(strategies())}")
    budget = None if prefill is None else TimeBudget(prefill=prefill, queries=tuple(queries), decode=decode)
    try:
        chooser = strategy_of(strategy, budget=budget, **(strategy_settings or {}))
    except TypeError as error:
        raise SearchError(f"strategy_settings: {error}") from None
    folder, sources = Path(output), _sources(calibration)
    job = SearchJob(
        model=str(model),
        data=SearchData(
            calibration=sources,
            evaluation=sources if evaluation is None else _sources(evaluation),
            seq_len=seq_len,
            num_sequences=Wish.unless(num_sequences, SEARCHED if prefill is None else SEARCHED_IN_TIME),
            num_eval_sequences=Wish.unless(num_eval_sequences, JUDGED),
            seed=seed,
            reply=reply,
            rows=rows,
        ),
        files=Files(folder=folder, work_dir=Path(work_dir or folder / "work"), restart=restart),
        run=run or RunSettings(),
        settings=Settings(retain=_retentions(retain), strategy=chooser, objective=objective, budget=budget),
        console=messages(quiet=not progress),
    )
    return run_job(job)


def evaluate(
    *,
    model: Source,
    output: str | Path,
    patterns: Source | Sequence[Source] = (),
    evaluation: Source | Sequence[Source] = (),
    tasks: Sequence[str] = (),
    retain: Retentions = DEFAULT_RETAIN,
    uniform: bool = True,
    endpoints: Sequence[str] = (),
    seq_len: int | None = None,
    num_sequences: int | None = None,
    reply: int | None = None,
    rows: RowOptions = AS_THEY_ARE,
    speed: SpeedOptions | None = None,
    run: RunSettings | None = None,
    restart: bool = False,
    progress: bool = False,
) -> ComparisonResult:
    """Compare patterns, or servers, on data that nobody searched on, as `indexcache-eval` does.

    Differences are paired: everything sees the same sequences. A comparison that was interrupted goes on where it was
    if it is called again with the same `output`.

    Args:
        model: folder or hub id; with `endpoints` only its tokenizer and config.json are read.
        output: folder of eval.json and eval.html.
        patterns: files, `FILE@1/4`, `uniform@1/4` or letters; `NAME=` before one names it in tables.
        evaluation: sources of held-out text.
        tasks: generated tasks, such as `kv` and `chain`.
        retain: retentions of files that are named without one.
        uniform: compare with uniform patterns at all phases.
        endpoints: OpenAI-compatible servers to compare instead of patterns; the first is the baseline.
        seq_len: tokens of a sequence; by default 4 times what a query selects.
        num_sequences: sequences of all sources together; by default 144, of which a source may have fewer.
        reply: tokens at the end of a sequence that alone count.
        rows: how rows of sources are read.
        speed: compare the speed of prompts as well.
        run: engine, device, dtype and batch size of patterns.
        restart: forget what an earlier comparison found.
        progress: print progress and messages to stderr.

    Returns:
        What eval.json holds: a row for each pattern or server, losses in nats a token with their intervals (95 %).

    Raises:
        IndexCacheError: if a request can't be met; one line says what was found and what was expected.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    from indexcache_search.eval.run import run as run_job

    job = ComparisonJob(
        model=str(model),
        candidates=Candidates(
            patterns=_sources(patterns),
            retentions=_retentions(retain),
            uniform=uniform,
            endpoints=tuple(map(Address.of, endpoints)),
        ),
        data=ComparisonData(
            sources=_sources(evaluation),
            seq_len=seq_len,
            sequences=Wish.unless(num_sequences, COMPARED),
            tasks=tuple(tasks),
            reply=reply,
            rows=rows,
        ),
        output=Path(output),
        run=run or RunSettings(),
        restart=restart,
        speed=speed,
        console=messages(quiet=not progress),
    )
    result = run_job(job)
    assert result is not None  # it is None only where data are shown
    return result


@contextmanager
def apply(model: nn.Module, pattern: Pattern | PatternFile | Source, *, prompt: Tensor | None = None) -> Iterator[None]:
    """Make a transformers model run a pattern inside the `with` block.

    An `F` layer selects; an `S` layer attends to what the `F` before it selected. Nothing else changes: with all `F`
    the model computes the same bit for bit. Afterwards it is as it was. Don't use a key/value cache that was filled
    under another pattern.

    Args:
        model: a model of transformers with sparse attention (DeepSeek-V3.2, GLM-5, DeepSeek-V4, or dense models of the
            extra `dense`).
        pattern: letters, a pattern file (`pattern.yaml@1/4`), or an object of either.
        prompt: `[batch, queries]`, bool, for patterns with blocks: queries that may share a selection with their
            neighbours. Such a forward takes no key/value cache.

    Raises:
        PatternFileError: if a file was made for another model.
        PatternError: if the pattern does not fit the model.
        IndexCacheError: if the model can't run it, for another reason that its line gives.
        RuntimeError: if the model runs a pattern already.
    """
    from indexcache_search.hf.roles import apply_roles

    with apply_roles(model, _fitting(model, pattern), prompt=prompt):
        yield


def _fitting(model: Any, pattern: Pattern | PatternFile | Source) -> Pattern:
    """Return a pattern that was checked against a loaded model."""
    if isinstance(pattern, Pattern):
        spec = PatternSpec(str(pattern), letters=pattern)
    elif isinstance(pattern, PatternFile):
        spec = PatternSpec("the pattern file", file=pattern)
    else:
        spec = PatternSpec.read(str(pattern))
    family = family_of_modules(model)
    name = next(item.__name__ for item in type(model).__mro__ if item.__name__ in family.checkpoint.keys)
    config = {**model.config.to_dict(), "architectures": [name]}
    description = describe(config, model.config.name_or_path or name)
    named = spec.letters or spec.file  # of a dense model it has a selection
    return spec.pattern(family.checkpoint.selecting(description, None if named is None else named.selection))


def _sources(given: Source | Sequence[Source]) -> tuple[str, ...]:
    return (str(given),) if isinstance(given, str | Path) else tuple(map(str, given))


def _retentions(given: Retentions) -> tuple[Fraction, ...]:
    words = given.split(",") if isinstance(given, str) else [given] if isinstance(given, Fraction) else given
    return tuple(dict.fromkeys(parse_retention(str(word)) for word in words))
