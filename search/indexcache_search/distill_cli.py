"""The command line: indexcache-distill."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from indexcache_search import bounded, data_flags, demo, run_flags, training_flags
from indexcache_search.distill.settings import Loss
from indexcache_search.errors import SearchError
from indexcache_search.needs import Need, Needs, refuse_unread
from indexcache_search.terminal import errors_in_one_line, messages, results, serving
from sglang_indexcache import process
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.spec import GRAMMAR, PatternSpec

SharedIndexers = Literal["auto", "drop", "keep"]

WARM_UP = Need("--warmup-steps above 0", lambda given: given["warmup_steps"] != 0)
SPARSE = Need("--steps above 0", lambda given: given["steps"] != 0)
WITH_RESULTS = Need("a run without --dry-run", lambda given: not given["dry_run"])
NEEDS: Needs = {
    **dict.fromkeys(("model", "pattern", "training", "evaluation", "seq_len", "num_sequences"), ()),
    **dict.fromkeys(("num_eval_sequences", "steps", "schedule", "ramp_steps", "batch_size", "micro_batch_size"), ()),
    **dict.fromkeys(("max_norm", "seed", "dtype", "device", "attention", "gradient_checkpointing"), ()),
    **dict.fromkeys(("evaluate_every", "checkpoint_every", "show_every", "output", "restart"), ()),
    **dict.fromkeys(("chat_template", "turns", "skip_bad_rows", "dry_run"), ()),
    **dict.fromkeys(("tensorboard", "json_"), (WITH_RESULTS,)),
    **dict.fromkeys(("loss", "warmup_steps", "memory_check", "shared_indexers"), ()),
    **dict.fromkeys(("indexer_lr", "lr", "weight_decay"), (SPARSE,)),
    "warmup_lr": (WARM_UP,),
}


@dataclass(frozen=True)
class Defaults:
    """What depends on whether this is the demo; rates and steps of a full run are DeepSeek-V3.2's and the paper's."""

    warmup_steps: int = 1000
    steps: int = 4000
    indexer_lr: float = 7.3e-6
    lr: float = 7.3e-6
    batch_size: int = 16
    seq_len: int | None = None
    num_sequences: int = 16384
    num_eval_sequences: int = 32


DEMO = Defaults(20, 40, 1e-3, 2e-4, 4, 512, 64, 24)

EPILOG = f"""
Examples:

\b
  indexcache-distill
      The demo: 60 small steps on the demo model, uniform 1/4. Two to three minutes on two cores.

\b
  indexcache-distill --model ./my-dsa-model --pattern uniform@1/4 --training sft.jsonl --seq-len 32768
      One GPU. Data as for indexcache-search (docs/reference/data.md); --dry-run says what is read of them, and ends.

\b
  torchrun --nproc-per-node 8 -m indexcache_search.distill --model ./my-dsa-model --pattern deploy/glm5.yaml@1/4 ...
      Eight GPUs: weights, gradients and optimizer are sharded with FSDP2.

\b
  python -m sglang_indexcache.launch_server --model-path OUTPUT/model --indexcache-pattern OUTPUT/pattern.yaml
      Serve what came out.

Run the same command again to go on after a kill, a crash or Ctrl-C: the losses are the same as without it.

\b
{exit_codes("the run failed (a loss was not finite)")}
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def distill(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a model. Default: the demo model.")] = None,
    pattern: Annotated[
        str | None,  # the flag is spelt out since typer 0.27 takes a metavar that is the name for it
        typer.Option("--pattern", help=f"{GRAMMAR}. Default: uniform@1/4.", metavar="PATTERN"),
    ] = None,
    training: training_flags.Training = None,
    evaluation: training_flags.Evaluation = None,
    chat_template: data_flags.ChatTemplate = None,
    turns: data_flags.TurnsFlag = "auto",
    skip_bad_rows: data_flags.SkipBadRows = 0,
    dry_run: data_flags.DryRun = False,
    seq_len: run_flags.SeqLen = None,
    num_sequences: Annotated[
        int | None,
        typer.Option(
            help="Training sequences; used again when all were seen. Default: 16384.",
            callback=bounded.within(1, 100_000_000),
        ),
    ] = None,
    num_eval_sequences: training_flags.NumEvalSequences = None,
    loss: Annotated[
        Loss,
        typer.Option(
            help="multi: each indexer learns from all layers it serves (Eq. 1)."
            " own: from its own layer only, the ablation."
        ),
    ] = "multi",
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            help="Dense steps in which only indexers train. Default: 1000; 0: none.", callback=bounded.steps(0)
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Sparse steps in which everything trains. Default: 4000; 0: none.", callback=bounded.steps(0)
        ),
    ] = None,
    warmup_lr: Annotated[
        float, typer.Option(help="Peak learning rate of the indexers in the warm-up.", callback=bounded.rate())
    ] = 1e-3,
    indexer_lr: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate of the indexers in the sparse stage. Default: 7.3e-6.", callback=bounded.rate()
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate of the body in the sparse stage. Default: 7.3e-6.", callback=bounded.rate()
        ),
    ] = None,
    schedule: training_flags.Schedule = "cosine",
    ramp_steps: training_flags.RampSteps = 50,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences a step. Default: 16.", callback=bounded.batch())
    ] = None,
    micro_batch_size: training_flags.MicroBatchSize = 1,
    weight_decay: training_flags.WeightDecay = 0.1,
    max_norm: training_flags.MaxNorm = 1.0,
    seed: training_flags.Seed = 0,
    dtype: training_flags.Dtype = "auto",
    device: training_flags.Device = "auto",
    attention: Annotated[
        str,
        typer.Option(
            help="auto, naive (dense in PyTorch, for short contexts) or kernels (this project's, CUDA only). auto:"
            " kernels on a CUDA device."
        ),
    ] = "auto",
    gradient_checkpointing: training_flags.GradientCheckpointing = True,
    memory_check: Annotated[bool, typer.Option(help="Estimate the memory before anything is loaded.")] = True,
    shared_indexers: Annotated[
        SharedIndexers,
        typer.Option(help="Weights of S layers' indexers in the result. auto: drop, but keep for deepseek_v32."),
    ] = "auto",
    evaluate_every: training_flags.EvaluateEvery = 100,
    checkpoint_every: training_flags.CheckpointEvery = 100,
    show_every: training_flags.ShowEvery = 10,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: indexcache-distilled-NAME.")
    ] = None,
    restart: training_flags.Restart = False,
    tensorboard: training_flags.Tensorboard = False,
    json_: Annotated[bool, typer.Option("--json", help="Print metrics.json to stdout, nothing else.")] = False,
) -> None:
    """Train a DSA model for a pattern, so that each remaining indexer serves all the layers that reuse it.

    Training-aware IndexCache (paper, Section 3.2). Writes model/, pattern.yaml, log.jsonl, curves.svg and
    metrics.json.
    """
    console = messages(quiet=os.environ.get("RANK", "0") != "0")
    is_demo = model is None
    with errors_in_one_line(console, "indexcache-distill"):
        for package in ("psutil", "torch", "transformers"):
            if find_spec(package) is None:
                raise SearchError(f"{package} is not installed; expected: pip install 'sglang-indexcache[distill]'")
        refuse_unread(context, NEEDS)
        from indexcache_search.distill.result import terminal_table
        from indexcache_search.distill.run import run
        from indexcache_search.distill.settings import Runtime, Settings
        from indexcache_search.hf.loading import describe_model
        from indexcache_search.training.sets import Data, show_data
        from indexcache_search.training.settings import Folders, Intervals

        if is_demo and training is None:
            training, evaluation = list(demo.CALIBRATION), evaluation or list(demo.EVALUATION)
        if not training:
            raise SearchError("--training is missing, expected a file, folder or hub id with text")
        name = model or str(demo.MODEL)
        description = describe_model(name)
        defaults = DEMO if is_demo else Defaults()
        chosen = PatternSpec.read(pattern or "uniform@1/4").pattern(description)
        chosen.check_plain("is not trained for yet")
        data = Data(
            training=tuple(training),
            evaluation=tuple(evaluation or training),
            seq_len=seq_len or defaults.seq_len or 4 * description.first_sparse_position,
            num_sequences=num_sequences or defaults.num_sequences,
            num_eval_sequences=num_eval_sequences or defaults.num_eval_sequences,
            rows=data_flags.row_options(chat_template, turns, skip_bad_rows),
        )
        if dry_run:
            if os.environ.get("RANK", "0") == "0":
                show_data(name, description, data, seed)
            return
        runtime = Runtime(
            device=device,
            dtype=dtype,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            check_memory=memory_check,
            keep_shared={"auto": None, "drop": False, "keep": True}[shared_indexers],
            intervals=Intervals(evaluate=evaluate_every, checkpoint=checkpoint_every, show=show_every),
            tensorboard=tensorboard,
        )
        folder = output or Path(f"indexcache-distilled-{'demo' if is_demo else Path(name).name}")
        settings = Settings(
            pattern=chosen,
            loss=loss,
            warmup_steps=defaults.warmup_steps if warmup_steps is None else warmup_steps,
            sparse_steps=defaults.steps if steps is None else steps,
            warmup_lr=warmup_lr,
            indexer_lr=defaults.indexer_lr if indexer_lr is None else indexer_lr,
            lr=defaults.lr if lr is None else lr,
            schedule=schedule,
            ramp_steps=ramp_steps,
            batch_size=batch_size or defaults.batch_size,
            micro_batch_size=micro_batch_size,
            weight_decay=weight_decay,
            max_norm=max_norm,
            seed=seed,
        )
        process.let_work_end()
        result, written = run(name, data, settings, runtime, Folders(folder, restart), console)
        if not result:
            return  # another process speaks
        if json_:
            sys.stdout.write(json.dumps(result, indent=1) + "\n")
            return
        out = results()
        out.print(terminal_table(result))
        out.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True)
        out.print(f"Next: {serving(folder / 'pattern.yaml', folder / 'model')}", soft_wrap=True)
