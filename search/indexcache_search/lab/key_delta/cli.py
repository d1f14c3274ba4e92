"""The command line: indexcache-lab key-delta."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from indexcache_search import bounded, data_flags, run_flags, selection_flags
from indexcache_search.lab.key_delta.plan import LONG
from indexcache_search.terminal import errors_in_one_line, messages, results
from sglang_indexcache import process
from sglang_indexcache.pattern import parse_retention
from sglang_indexcache.spec import GRAMMAR

app = typer.Typer(
    help="Keys as differences above thresholds (DeltaLLM, arXiv 2507.19608).",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

Model = Annotated[str, typer.Option(help="Folder or hub id of a dense model.")]
SeqLen = Annotated[int, typer.Option(help="Tokens a sequence.", callback=bounded.tokens())]
Window = Annotated[
    float | None,
    typer.Option(
        help="Keys that stay exact near a prompt's query, as a share. Default: 0.05.", callback=bounded.within(0, 1)
    ),
]
MaxWindow = Annotated[int | None, typer.Option(help="Those keys at most.", callback=bounded.tokens())]
RecentKeys = Annotated[
    int | None,
    typer.Option(help="Last keys that stay exact for a reply's query. Default: 4.", callback=bounded.tokens()),
]
PrefixCache = Annotated[
    float, typer.Option(help="Host memory for what layers give, and as much again.", callback=bounded.within(0, 1e6))
]


@app.command(context_settings=SETTINGS)
def search(
    model: Model,
    calibration: Annotated[
        list[str], typer.Option(help="Calibration source: file, folder, hub id; repeatable.", metavar="SOURCE")
    ],
    evaluation: Annotated[
        list[str] | None,
        typer.Option(help="Held-out source; repeatable. Default: the calibration sources.", metavar="SOURCE"),
    ] = None,
    chat_template: data_flags.ChatTemplate = None,
    turns: data_flags.TurnsFlag = "auto",
    skip_bad_rows: data_flags.SkipBadRows = 0,
    dry_run: data_flags.DryRun = False,
    seq_len: SeqLen = LONG,
    num_sequences: Annotated[int, typer.Option(help="Calibration sequences.", callback=bounded.sequences())] = 32,
    num_eval_sequences: Annotated[int, typer.Option(help="Held-out sequences.", callback=bounded.sequences())] = 32,
    skip: Annotated[
        str, typer.Option(help="Shares of the products of queries with keys that layers leave out together.")
    ] = "0.4,0.6",
    window: Window = None,
    max_window: MaxWindow = None,
    recent_keys: RecentKeys = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("indexcache-key-delta"),
    work_dir: Annotated[Path | None, typer.Option(help="Folder of the journal. Default: OUTPUT/work.")] = None,
    restart: run_flags.Restart = False,
    device: run_flags.Device = "auto",
    dtype: run_flags.Dtype = "float32",
    batch_size: run_flags.BatchSize = 1,
    prefix_cache_gb: PrefixCache = 2.0,
    seed: run_flags.Seed = 0,
) -> None:
    """Find thresholds for each layer of a dense model.

    Writes thresholds-SHARE.json, and a comparison on held-out data: eval.json and eval.html. Run it again to go on
    after a kill.
    """
    console = messages()
    with errors_in_one_line(console, "indexcache-lab key-delta search"):
        from indexcache_search.compare.run import Runtime
        from indexcache_search.lab.key_delta.run import KeySettings, run, shares_of, show, show_data
        from indexcache_search.run import Data, Files

        near = _near(window, max_window, recent_keys)
        settings = KeySettings(shares=shares_of(skip), near=near, seed=seed)
        rows = data_flags.row_options(chat_template, turns, skip_bad_rows)
        held_out = tuple(evaluation or calibration)
        data = Data(tuple(calibration), held_out, seq_len, num_sequences, num_eval_sequences, rows=rows)
        if dry_run:
            show_data(model, data, seed)
            return
        runtime = Runtime(
            device=device, dtype=dtype, batch_size=batch_size, prefix_cache_gb=prefix_cache_gb, attention="naive"
        )
        process.let_work_end()
        files = Files(output, work_dir or output / "work", restart, report=True)
        show(run(model, data, runtime, settings, files, console), model, results())


@app.command("eval", context_settings=SETTINGS)
def evaluate(
    model: Model,
    evaluation: Annotated[list[str], typer.Option(help="Held-out source; repeatable.", metavar="SOURCE")],
    chat_template: data_flags.ChatTemplate = None,
    turns: data_flags.TurnsFlag = "auto",
    skip_bad_rows: data_flags.SkipBadRows = 0,
    dry_run: data_flags.DryRun = False,
    threshold: Annotated[
        str,
        typer.Option(help="Thresholds, each for all layers, or files of indexcache-lab key-delta search."),
    ] = "0.2,0.6,1.0",
    window: Window = None,
    max_window: MaxWindow = None,
    recent_keys: RecentKeys = None,
    rivals: Annotated[bool, typer.Option(help="Compare with windows, blocks and few bits, at equal savings.")] = True,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",  # typer 0.27 takes a metavar that is the name for the flag
            help=f"To compare with: {GRAMMAR}, with NAME= before it for the table; repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    retain: Annotated[str, typer.Option(help="Retentions of files that name none.")] = "1/2,1/4,1/8",
    pages: selection_flags.PagesEach = "",
    page_tokens: selection_flags.PageTokens = None,
    recent_pages: selection_flags.RecentPages = None,
    sink_pages: selection_flags.SinkPages = None,
    score: selection_flags.Score = None,
    steps: selection_flags.StepsEach = "",
    seq_len: SeqLen = LONG,
    num_sequences: Annotated[
        int, typer.Option(help="Held-out sequences, of all sources together.", callback=bounded.sequences())
    ] = 144,
    output: Annotated[Path, typer.Option(help="Folder for eval.json and eval.html.")] = Path("indexcache-eval"),
    restart: run_flags.Restart = False,
    device: run_flags.Device = "auto",
    dtype: run_flags.Dtype = "float32",
    batch_size: run_flags.BatchSize = 1,
    prefix_cache_gb: PrefixCache = 1.0,
) -> None:
    """Compare what thresholds save on a dense model, and lose, with what saves as much."""
    console = messages()
    with errors_in_one_line(console, "indexcache-lab key-delta eval"):
        from indexcache_search.compare.run import Data, Runtime, run, show
        from indexcache_search.lab.key_delta.compare import KeyCandidates, asked_for

        candidates = KeyCandidates(
            asked=asked_for(threshold, _near(window, max_window, recent_keys)),
            rivals=rivals,
            patterns=tuple(pattern or ()),
            retentions=tuple(parse_retention(item) for item in retain.split(",")),
            selections=selection_flags.selections_of(
                pages=pages,
                page_tokens=page_tokens,
                recent_pages=recent_pages,
                sink_pages=sink_pages,
                score=score,
                steps=steps,
            ),
        )
        data = Data(
            sources=tuple(evaluation),
            seq_len=seq_len,
            sequences=num_sequences,
            rows=data_flags.row_options(chat_template, turns, skip_bad_rows),
            only_shown=dry_run,
        )
        runtime = Runtime(
            device=device, dtype=dtype, batch_size=batch_size, prefix_cache_gb=prefix_cache_gb, attention="naive"
        )
        process.let_work_end()
        found = run(model, candidates, data, runtime, output, restart, console)
        if found is not None:
            show(found, output, results())


def _near(window: float | None, max_window: int | None, recent_keys: int | None) -> dict[str, Any]:
    """What the flags say of a `KeyPlan`."""
    flags = {"window": window, "max_window": max_window, "recent": recent_keys}
    return {name: value for name, value in flags.items() if value is not None}
