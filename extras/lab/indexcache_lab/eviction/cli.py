"""The command line: indexcache-lab eviction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection_choice import NOSAS, PagesChoice, SelectionChoice
from indexcache_lab.options import DenseModel
from indexcache_search.cli import options
from indexcache_search.cli.bounded import BATCH, TOKENS
from indexcache_search.cli.command import Config, Version, application, number, option, settings
from indexcache_search.console import errors_in_one_line, messages, results
from indexcache_train import cli as distill
from indexcache_train.options import RATE, STEPS_OR_NONE, TRAINING_SEQUENCES, NumEvalSequences
from sglang_indexcache import process
from sglang_indexcache.pattern import FULL
from sglang_indexcache.pattern_file.pattern_name import GRAMMAR, PatternSpec

COMMAND = "indexcache-lab eviction"


@dataclass(frozen=True, kw_only=True)
class HeadsChoice:
    """Learning rate and use of eviction heads; see `EvictionSettings`."""

    lr: Annotated[float, RATE] = 1e-2
    bias: Literal["always", "training"] = "always"
    detach: bool = False
    query_pages: Annotated[int, TOKENS] = 8


@dataclass(frozen=True, kw_only=True)
class BodyChoice:
    """Training of the model beside its heads."""

    lr: Annotated[float, RATE] = 7.3e-6


def eviction(
    *,
    model: DenseModel,
    training: Annotated[list[str], options.sources("Training text")],
    pattern: Annotated[str | None, option(f"{GRAMMAR}. Default: all F.", "--pattern", metavar="PATTERN")] = None,
    selection: Annotated[
        PagesChoice | None,
        settings(
            PagesChoice,
            "What layers attend to. Keys: pages (64), page_tokens (64), recent_pages (the newest; one in 4), sink_pages"
            " (the first; 1), heads (joint, or key: each key head chooses for itself, as in the paper).",
        ),
    ] = None,
    evaluation: options.HeldOutOrSame = None,
    rows: options.Rows = None,
    dry_run: options.DryRun = False,
    seq_len: options.SeqLen = None,
    num_sequences: Annotated[
        int | None,
        number("Training sequences, used again when all were seen. Default: 1600.", TRAINING_SEQUENCES),
    ] = None,
    num_eval_sequences: NumEvalSequences = None,
    seed: options.Seed = 0,
    steps: Annotated[int, number("Steps.", STEPS_OR_NONE)] = 200,
    heads: Annotated[
        HeadsChoice | None,
        settings(
            HeadsChoice,
            "Keys: lr (peak learning rate; 1e-2), bias (always: added wherever pages are chosen; training: for the"
            " heads' gradients alone), detach (values get no gradient through the bias, unlike in the official code;"
            " no), query_pages (that a query chooses; the heads choose the others; 8).",
        ),
    ] = None,
    body: Annotated[
        BodyChoice | None,
        settings(
            BodyChoice,
            "Train the model, too, by its own loss; else heads alone, by the divergence from it. Keys: lr (7.3e-6).",
        ),
    ] = None,
    ramp_steps: Annotated[int, number("Steps of the ramp at the beginning.", STEPS_OR_NONE)] = 50,
    batch_size: Annotated[int, number("Sequences of a step.", BATCH)] = 8,
    engine: Annotated[
        distill.TrainingEngineChoice | None,
        settings(distill.TrainingEngineChoice, f"Keys: {distill.ENGINE_KEYS}."),
    ] = None,
    device: distill.Device = "auto",
    dtype: distill.Dtype = "auto",
    every: distill.Every = None,
    output: Annotated[Path | None, option("Folder for the results. Default: indexcache-distilled-NAME.")] = None,
    restart: options.Restart = False,
    config: Config = None,
    version: Version = False,
) -> None:
    """Train NOSA's eviction heads of a dense model, which say what a cache may leave in host memory.

    Writes model/, pattern.yaml, log.jsonl and metrics.json (arXiv 2510.13602). Run it again to go on after a kill.
    """
    console = messages()
    with errors_in_one_line(console, COMMAND):
        head, beside, runs = heads or HeadsChoice(), body or BodyChoice(), engine or distill.TrainingEngineChoice()
        nosa = ReusePolicy(policy="nosa", query_pages=head.query_pages, importance="heads")
        chosen = options.selection_of(
            SelectionChoice(**vars(selection or PagesChoice()), score=NOSAS.score, steps=(nosa,))
        )
        from indexcache_lab.dense import describe_dense, next_line
        from indexcache_lab.eviction.run import run, terminal_table
        from indexcache_lab.eviction.task import EvictionSettings
        from indexcache_search.data.packing import Wish
        from indexcache_train.distill.settings import TrainingRuntime
        from indexcache_train.training.sets import TrainingData, show_data
        from indexcache_train.training.settings import Folders, Intervals

        description = describe_dense(model, chosen)
        spec = PatternSpec.read(pattern or FULL * description.num_layers, chosen)
        data = TrainingData(
            training=tuple(training),
            evaluation=tuple(evaluation or training),
            seq_len=seq_len or 4 * description.first_sparse_position,
            num_sequences=num_sequences or Wish(1600),
            num_eval_sequences=num_eval_sequences or Wish(32),
            rows=options.row_options(rows),
        )
        if dry_run:
            show_data(model, description, data, seed)
            return
        learning = EvictionSettings(
            pattern=replace(spec.pattern(description), selection=chosen),
            use=head.bias,
            detach=head.detach,
            body=body is not None,
            steps=steps,
            heads_lr=head.lr,
            lr=beside.lr,
            batch_size=batch_size,
            micro_batch_size=runs.micro_batch,
            ramp_steps=ramp_steps,
            seed=seed,
        )
        runtime = TrainingRuntime(
            device=device,
            dtype=dtype,
            gradient_checkpointing=runs.gradient_checkpointing,
            intervals=Intervals(**vars(every or distill.EveryChoice())),
        )
        folder = output or Path(f"indexcache-distilled-{Path(model).name}")
        process.let_work_end()
        result, written = run(model, data, learning, runtime, Folders(folder, restart, COMMAND), console=console)
        out = results()
        out.print(terminal_table(result))
        out.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True)
        out.print(next_line(learning.pattern, folder / "pattern.yaml", folder / "model"), soft_wrap=True)


app = application({"eviction": eviction})
