"""The command line: indexcache-lab key-delta."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from indexcache_lab.key_delta.plan import LONG
from indexcache_lab.options import GIGABYTES, DenseModel, Length
from indexcache_search.cli import options
from indexcache_search.cli.bounded import SEQUENCES, TOKENS, Bounds
from indexcache_search.cli.command import Config, Version, application, number, option, settings
from indexcache_search.console import errors_in_one_line, messages, results
from indexcache_search.data import COMPARED
from indexcache_search.strategies import DEFAULT_RETAIN
from indexcache_train.options import NumEvalSequences
from sglang_indexcache import process


@dataclass(frozen=True, kw_only=True)
class NearChoice:
    """Keys that stay exact near a query; the defaults of `KeyPlan` stand for settings that are not given."""

    window: Annotated[float, Bounds(0, 1)] | None = None
    max_window: Annotated[int, TOKENS] | None = None
    recent: Annotated[int, TOKENS] | None = None


Near = Annotated[
    NearChoice | None,
    settings(
        NearChoice,
        "Keys that stay exact. Keys: window (near a prompt's query, as a share; 0.05), max_window (those at most),"
        " recent (the last ones, for a reply's query; 4).",
    ),
]
PrefixCache = Annotated[float, number("Host memory for what layers give, and as much again.", GIGABYTES)]


def search(
    *,
    model: DenseModel,
    calibration: Annotated[list[str], options.sources("Calibration text")],
    evaluation: options.HeldOutOrSame = None,
    rows: options.Rows = None,
    dry_run: options.DryRun = False,
    seq_len: Length = LONG,
    num_sequences: Annotated[int | None, number("Sequences, of all sources together. Default: 32.", SEQUENCES)] = None,
    num_eval_sequences: NumEvalSequences = None,
    seed: options.Seed = 0,
    skip: Annotated[
        str, option("Shares of the products of queries with keys that layers leave out together.")
    ] = "0.4,0.6",
    near: Near = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_size: options.BatchSize = 1,
    prefix_cache_gb: PrefixCache = 2.0,
    output: Annotated[Path, option("Folder for the results.")] = Path("indexcache-key-delta"),
    work_dir: options.WorkDir = None,
    restart: options.Restart = False,
    config: Config = None,
    version: Version = False,
) -> None:
    """Find thresholds for each layer of a dense model.

    Writes thresholds-SHARE.json, and a comparison on held-out data: eval.json and eval.html. Run it again to go on
    after a kill.
    """
    console = messages()
    with errors_in_one_line(console, "indexcache-lab key-delta search"):
        options.check_runs_here(device, dtype)
        from indexcache_lab.key_delta.run import run, shares_of, show_data
        from indexcache_search.data.packing import Wish
        from indexcache_search.engines.settings import RunSettings
        from indexcache_search.searching.job import Files, SearchData

        shares = shares_of(skip)
        data = SearchData(
            calibration=tuple(calibration),
            evaluation=tuple(evaluation or calibration),
            seq_len=seq_len,
            seed=seed,
            num_sequences=num_sequences or Wish(32),
            num_eval_sequences=num_eval_sequences or Wish(32),
            rows=options.row_options(rows),
        )
        if dry_run:
            show_data(model, data)
            return
        own = {"prefix_cache_gb": prefix_cache_gb, "attention": "naive"}
        runtime = RunSettings(device=device, dtype=dtype, batch_size=batch_size, own=own)
        process.let_work_end()
        files = Files(folder=output, work_dir=work_dir or output / "work", restart=restart)
        run(model, data, runtime, files, console, shares=shares, near=_given(near))


def evaluate(
    *,
    model: DenseModel,
    evaluation: Annotated[list[str], options.sources("Held-out text")],
    pattern: options.Patterns = None,
    selection: options.Selections = None,
    retain: options.Retain = DEFAULT_RETAIN,
    rows: options.Rows = None,
    dry_run: options.DryRun = False,
    seq_len: Length = LONG,
    num_sequences: Annotated[
        int | None, number(f"Sequences, of all sources together. Default: {COMPARED}.", SEQUENCES)
    ] = None,
    threshold: Annotated[
        str, option("Thresholds, each for all layers, or files of indexcache-lab key-delta search.")
    ] = "0.2,0.6,1.0",
    near: Near = None,
    rivals: Annotated[bool, option("Compare with windows, blocks and few bits, at equal savings.")] = True,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_size: options.BatchSize = 1,
    prefix_cache_gb: PrefixCache = 1.0,
    output: Annotated[Path, option("Folder for eval.json and eval.html.")] = Path("indexcache-eval"),
    restart: options.Restart = False,
    config: Config = None,
    version: Version = False,
) -> None:
    """Compare what thresholds save on a dense model, and lose, with what saves as much."""
    console = messages()
    with errors_in_one_line(console, "indexcache-lab key-delta eval"):
        options.check_runs_here(device, dtype)
        from indexcache_lab.key_delta.compare import KeyCandidates, read_thresholds
        from indexcache_search.data.packing import Wish
        from indexcache_search.engines.settings import RunSettings
        from indexcache_search.eval.held_out import ComparisonData
        from indexcache_search.eval.job import ComparisonJob
        from indexcache_search.eval.run import run, show

        candidates = KeyCandidates(
            thresholds=read_thresholds(threshold),
            near=_given(near),
            rivals=rivals,
            patterns=tuple(pattern or ()),
            retentions=options.retentions(retain),
            selections=options.selections_of(selection),
        )
        data = ComparisonData(
            sources=tuple(evaluation),
            seq_len=seq_len,
            sequences=num_sequences or Wish(COMPARED),
            rows=options.row_options(rows),
            only_shown=dry_run,
        )
        own = {"prefix_cache_gb": prefix_cache_gb, "attention": "naive"}
        runtime = RunSettings(device=device, dtype=dtype, batch_size=batch_size, own=own)
        process.let_work_end()
        job = ComparisonJob(
            model=model,
            candidates=candidates,
            data=data,
            output=output,
            run=runtime,
            restart=restart,
            console=console,
        )
        found = run(job)
        if found is not None:
            show(found, output, results())


def _given(near: NearChoice | None) -> dict[str, Any]:
    return {} if near is None else {key: value for key, value in vars(near).items() if value is not None}


app = application({"search": search, "eval": evaluate}, help="Keys as differences above thresholds (arXiv 2507.19608).")
