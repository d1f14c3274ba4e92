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
from rich.console import Console

from indexcache_search import demo
from indexcache_search.cli import FIRST_CHOICE, errors_in_one_line
from indexcache_search.distill.settings import Loss, Schedule
from indexcache_search.errors import SearchError
from sglang_indexcache.spec import GRAMMAR, PatternSpec

SharedIndexers = Literal["auto", "drop", "keep"]


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

EPILOG = """
Examples:

\b
  indexcache-distill
      The demo: 60 small steps on the demo model, uniform 1/4. Two to three minutes on two cores.

\b
  indexcache-distill --model ./my-dsa-model --pattern uniform@1/4 --training sft.jsonl --seq-len 32768
      One GPU. Data as for indexcache-search: rows hold `text`, `messages` or `input_ids` with `loss_mask`.

\b
  torchrun --nproc-per-node 8 -m indexcache_search.distill --model ./my-dsa-model --pattern deploy/glm5.yaml@1/4 ...
      Eight GPUs: weights, gradients and optimizer are sharded with FSDP2.

\b
  python -m sglang_indexcache.launch_server --model-path OUTPUT/model --indexcache-pattern OUTPUT/pattern.yaml
      Serve what came out.

Run the same command again to go on after a kill, a crash or Ctrl-C: the losses are the same as without it.

\b
Exit codes: 0 done, 1 the run failed (a loss was not finite), 2 bad input, 70 a bug of ours, 130 interrupted.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def distill(
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a DSA model. Default: the demo model.")] = None,
    pattern: Annotated[
        str,  # the flag is spelt out since typer 0.27 takes a metavar that is the name for it
        typer.Option("--pattern", help=f"{GRAMMAR}.", metavar="PATTERN"),
    ] = "uniform@1/4",
    training: Annotated[
        list[str] | None, typer.Option(help="Training source: file, folder, hub id; repeatable.", metavar="SOURCE")
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        typer.Option(help="Held-out source; repeatable. Default: the training sources.", metavar="SOURCE"),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens a sequence; more than {FIRST_CHOICE}. Default: 4 times that.", min=1)
    ] = None,
    num_sequences: Annotated[
        int | None, typer.Option(help="Training sequences; used again when all were seen. Default: 16384.", min=1)
    ] = None,
    num_eval_sequences: Annotated[int | None, typer.Option(help="Held-out sequences. Default: 32.", min=1)] = None,
    loss: Annotated[
        Loss,
        typer.Option(
            help="multi: each indexer learns from all layers it serves (Eq. 1)."
            " own: from its own layer only, the ablation."
        ),
    ] = "multi",
    warmup_steps: Annotated[
        int | None, typer.Option(help="Dense steps in which only indexers train. Default: 1000; 0: none.", min=0)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Sparse steps in which everything trains. Default: 4000; 0: none.", min=0)
    ] = None,
    warmup_lr: Annotated[float, typer.Option(help="Peak learning rate of the indexers in the warm-up.", min=0)] = 1e-3,
    indexer_lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate of the indexers in the sparse stage. Default: 7.3e-6.", min=0),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate of the body in the sparse stage. Default: 7.3e-6.", min=0)
    ] = None,
    schedule: Annotated[
        Schedule, typer.Option(help="cosine: to a tenth. wsd: stays, and falls to 0 over the last fifth.")
    ] = "cosine",
    ramp_steps: Annotated[int, typer.Option(help="Steps of the ramp that each stage begins with.", min=0)] = 50,
    batch_size: Annotated[int | None, typer.Option(help="Sequences a step. Default: 16.", min=1)] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences a forward of one process.", min=1)] = 1,
    weight_decay: Annotated[float, typer.Option(help="Of the body's matrices.", min=0)] = 0.1,
    max_norm: Annotated[float, typer.Option(help="To which gradients are clipped.", min=0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Order of the training sequences.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Of the computations: float32, bfloat16 or auto. What trains is float32 in any case.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    attention: Annotated[
        str,
        typer.Option(
            help="auto, naive (dense in PyTorch, for short contexts) or kernels (this project's, CUDA only). auto:"
            " kernels on a CUDA device."
        ),
    ] = "auto",
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Keep the input of each layer alone, and run it again for the gradients.")
    ] = True,
    memory_check: Annotated[bool, typer.Option(help="Estimate the memory before anything is loaded.")] = True,
    shared_indexers: Annotated[
        SharedIndexers,
        typer.Option(help="Weights of S layers' indexers in the result. auto: drop, but keep for deepseek_v32."),
    ] = "auto",
    evaluate_every: Annotated[int, typer.Option(help="Steps between held-out evaluations.", min=1)] = 100,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 100,
    show_every: Annotated[int, typer.Option(help="Steps between lines on the terminal; the log has all.", min=1)] = 10,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: indexcache-distilled-NAME.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an earlier run's work and start afresh.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files to OUTPUT/tensorboard.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print metrics.json to stdout, nothing else.")] = False,
) -> None:
    """Train a DSA model for a pattern, so that each remaining indexer serves all the layers that reuse it.

    Training-aware IndexCache (paper, Section 3.2). Writes model/, pattern.yaml, log.jsonl, curves.svg and
    metrics.json.
    """
    console = Console(stderr=True, highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    is_demo = model is None
    with errors_in_one_line(console, "indexcache-distill"):
        for package in ("psutil", "torch", "transformers"):
            if find_spec(package) is None:
                raise SearchError(f"{package} is not installed; expected: pip install 'sglang-indexcache[distill]'")
        from indexcache_search.distill.result import terminal_table
        from indexcache_search.distill.run import run
        from indexcache_search.distill.settings import Data, Runtime, Settings
        from indexcache_search.hf.loading import describe_model
        from indexcache_search.training.settings import Folders, Intervals

        if is_demo and training is None:
            training, evaluation = list(demo.CALIBRATION), evaluation or list(demo.EVALUATION)
        if not training:
            raise SearchError("--training is missing, expected a file, folder or hub id with text")
        name = model or str(demo.MODEL)
        description = describe_model(name)
        defaults = DEMO if is_demo else Defaults()
        settings = Settings(
            pattern=PatternSpec.read(pattern).pattern(description),
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
        data = Data(
            training=tuple(training),
            evaluation=tuple(evaluation or training),
            seq_len=seq_len or defaults.seq_len or 4 * description.first_choice,
            num_sequences=num_sequences or defaults.num_sequences,
            num_eval_sequences=num_eval_sequences or defaults.num_eval_sequences,
        )
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
        result = run(name, data, settings, runtime, Folders(folder, restart), console)
    if not result:
        return  # another process speaks
    if json_:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
        return
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(terminal_table(result))
    names = [folder / name for name in ("model", "pattern.yaml", "curves.svg", "metrics.json", "log.jsonl")]
    out.print(f"Wrote {', '.join(map(str, names))}", soft_wrap=True)
