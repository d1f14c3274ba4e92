"""The command line: indexcache-lab eviction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from indexcache_search import bounded, data_flags, run_flags, training_flags
from indexcache_search import selection_flags as flags
from indexcache_search.errors import SearchError
from indexcache_search.terminal import errors_in_one_line, messages, results, serving
from sglang_indexcache import process
from sglang_indexcache.pattern import FULL
from sglang_indexcache.spec import GRAMMAR, PatternSpec
from sglang_indexcache.steps import Steps

COMMAND = "indexcache-lab eviction"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def eviction(
    model: Annotated[str, typer.Option(help="Folder or hub id of a dense model.")],
    training: Annotated[
        list[str], typer.Option(help="Training source: file, folder, hub id; repeatable.", metavar="SOURCE")
    ],
    evaluation: training_flags.Evaluation = None,
    chat_template: data_flags.ChatTemplate = None,
    turns: data_flags.TurnsFlag = "auto",
    skip_bad_rows: data_flags.SkipBadRows = 0,
    dry_run: data_flags.DryRun = False,
    seq_len: run_flags.SeqLen = None,
    num_sequences: Annotated[
        int,
        typer.Option(
            help="Training sequences, used again when all were seen.", callback=bounded.within(1, 100_000_000)
        ),
    ] = 1600,
    num_eval_sequences: training_flags.NumEvalSequences = None,
    pattern: Annotated[
        str | None,  # the flag is spelt out since typer 0.27 takes a metavar that is the name for it
        typer.Option("--pattern", help=f"{GRAMMAR}. Default: all F.", metavar="PATTERN"),
    ] = None,
    pages: Annotated[int | None, typer.Option(help=f"{flags.PAGES}. Default: 64.", callback=bounded.tokens(2))] = None,
    query_pages: Annotated[
        int, typer.Option(help="Pages that a query chooses; the heads choose the others.", callback=bounded.tokens())
    ] = 8,
    page_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a page. Default: 64.", callback=bounded.tokens())
    ] = None,
    recent_pages: Annotated[
        int | None,
        typer.Option(help="Newest pages, always attended to. Default: one in 4.", callback=bounded.tokens(0)),
    ] = None,
    sink_pages: Annotated[
        int | None, typer.Option(help="First pages, likewise. Default: 1.", callback=bounded.tokens(0))
    ] = None,
    bias: Annotated[
        Literal["always", "training"],
        typer.Option(
            help="always: added to the products wherever pages are chosen (ED-DMA). training: for the heads' gradients"
            " alone (S-DMA)."
        ),
    ] = "always",
    body: Annotated[
        bool,
        typer.Option(
            "--body/--no-body",
            help="Train the model, too, by its own loss; else heads alone, by the divergence from it.",
        ),
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps.", callback=bounded.steps(0))] = 200,
    heads_lr: Annotated[float, typer.Option(help="Peak learning rate of the heads.", callback=bounded.rate())] = 1e-2,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate of the body. Default: 7.3e-6.", callback=bounded.rate())
    ] = None,
    ramp_steps: training_flags.RampSteps = 50,
    batch_size: Annotated[int, typer.Option(help="Sequences a step.", callback=bounded.batch())] = 8,
    micro_batch_size: training_flags.MicroBatchSize = 1,
    seed: training_flags.Seed = 0,
    dtype: training_flags.Dtype = "auto",
    device: training_flags.Device = "auto",
    gradient_checkpointing: training_flags.GradientCheckpointing = True,
    evaluate_every: training_flags.EvaluateEvery = 100,
    checkpoint_every: training_flags.CheckpointEvery = 100,
    show_every: training_flags.ShowEvery = 10,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: indexcache-distilled-NAME.")
    ] = None,
    restart: training_flags.Restart = False,
) -> None:
    """Train NOSA's eviction heads of a dense model, which say what a cache may leave in host memory.

    Writes model/, pattern.yaml, log.jsonl and metrics.json (arXiv 2510.13602). Run it again to go on after a kill.
    """
    console = messages()
    with errors_in_one_line(console, COMMAND):
        if lr is not None and not body:
            raise SearchError("--lr needs --body")
        from indexcache_search.distill.settings import Runtime
        from indexcache_search.hf.loading import describe_model
        from indexcache_search.lab.eviction.run import run, terminal_table
        from indexcache_search.lab.eviction.settings import EvictionSettings
        from indexcache_search.training.sets import Data, show_data
        from indexcache_search.training.settings import Folders, Intervals

        [plain] = flags.selections_of(
            pages="" if pages is None else str(pages),
            page_tokens=page_tokens,
            recent_pages=recent_pages,
            sink_pages=sink_pages,
            score="compressed_keys",
        )
        nosa = Steps(policy="nosa", query_pages=query_pages, importance="heads")
        selection = replace(plain, steps=nosa)
        description = describe_model(model)
        if not description.dense:
            raise SearchError(f"eviction heads are for dense models; {description.name} has indexers that choose")
        description = describe_model(model, selection)
        letters = pattern or FULL * description.num_layers
        chosen = replace(PatternSpec.read(letters, selection).pattern(description), selection=selection)
        data = Data(
            training=tuple(training),
            evaluation=tuple(evaluation or training),
            seq_len=seq_len or 4 * description.first_sparse_position,
            num_sequences=num_sequences,
            num_eval_sequences=num_eval_sequences or 32,
            rows=data_flags.row_options(chat_template, turns, skip_bad_rows),
        )
        if dry_run:
            show_data(model, description, data, seed)
            return
        settings = EvictionSettings(
            pattern=chosen,
            use=bias,
            body=body,
            steps=steps,
            heads_lr=heads_lr,
            lr=7.3e-6 if lr is None else lr,
            ramp_steps=ramp_steps,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            seed=seed,
        )
        runtime = Runtime(
            device=device,
            dtype=dtype,
            attention="naive",
            gradient_checkpointing=gradient_checkpointing,
            check_memory=False,
            keep_shared=None,
            intervals=Intervals(evaluate=evaluate_every, checkpoint=checkpoint_every, show=show_every),
            tensorboard=False,
        )
        folder = output or Path(f"indexcache-distilled-{Path(model).name}")
        process.let_work_end()
        result, written = run(model, data, settings, runtime, Folders(folder, restart, COMMAND), console)
        out = results()
        out.print(terminal_table(result))
        out.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True)
        out.print(f"Next: {serving(folder / 'pattern.yaml', folder / 'model')}", soft_wrap=True)
