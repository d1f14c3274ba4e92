"""The command line: indexcache-distill."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from indexcache_search import bounded, data_flags, demo
from indexcache_search import selection_flags as flags
from indexcache_search.cli import FIRST_CHOICE
from indexcache_search.distill.settings import Loss, Schedule
from indexcache_search.errors import SearchError
from indexcache_search.needs import Need, Needs, refuse_unread
from indexcache_search.terminal import errors_in_one_line, messages, results, serving
from sglang_indexcache import process
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.pattern import FULL
from sglang_indexcache.spec import GRAMMAR, PatternSpec
from sglang_indexcache.steps import Steps

BiasUse = Literal["always", "training"]
SharedIndexers = Literal["auto", "drop", "keep"]
Trained = Literal["indexers", "eviction"]

INDEXERS = Need("--train indexers", lambda given: given["train"] == "indexers")
HEADS_ALONE = Need("--train eviction", lambda given: given["train"] == "eviction")
BODY = Need("--train indexers, or --body", lambda given: given["train"] == "indexers" or given["body"])
WARM_UP = Need("--warmup-steps above 0", lambda given: given["warmup_steps"] != 0)
SPARSE = Need("--steps above 0", lambda given: given["steps"] != 0)
WITH_RESULTS = Need("a run without --dry-run", lambda given: not given["dry_run"])
NEEDS: Needs = {
    **dict.fromkeys(("train", "model", "pattern", "training", "evaluation", "seq_len", "num_sequences"), ()),
    **dict.fromkeys(("num_eval_sequences", "steps", "schedule", "ramp_steps", "batch_size", "micro_batch_size"), ()),
    **dict.fromkeys(("max_norm", "seed", "dtype", "device", "attention", "gradient_checkpointing"), ()),
    **dict.fromkeys(("evaluate_every", "checkpoint_every", "show_every", "output", "restart"), ()),
    **dict.fromkeys(("chat_template", "turns", "skip_bad_rows", "dry_run"), ()),
    **dict.fromkeys(("tensorboard", "json_"), (WITH_RESULTS,)),
    **dict.fromkeys(("loss", "warmup_steps", "memory_check", "shared_indexers"), (INDEXERS,)),
    **dict.fromkeys(("heads_lr", "body", "bias", "query_pages"), (HEADS_ALONE,)),
    **dict.fromkeys(("pages", "page_tokens", "recent_pages", "sink_pages"), (HEADS_ALONE,)),
    **dict.fromkeys(("lr", "weight_decay"), (BODY, SPARSE)),
    "warmup_lr": (INDEXERS, WARM_UP),
    "indexer_lr": (INDEXERS, SPARSE),
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
HEADS = Defaults(0, 200, num_sequences=1600, batch_size=8)

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
  indexcache-distill --train eviction --model Qwen/Qwen3-0.6B --training sft.jsonl --seq-len 8192 --pages 32
      A dense model: NOSA's eviction heads, which say what a cache may leave in host memory (docs/lab/eviction.md).

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
    train: Annotated[
        Trained, typer.Option(help="indexers: of DSA models. eviction: NOSA's eviction heads, of dense models.")
    ] = "indexers",
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a model. Default: the demo model.")] = None,
    pattern: Annotated[
        str | None,  # the flag is spelt out since typer 0.27 takes a metavar that is the name for it
        typer.Option("--pattern", help=f"{GRAMMAR}. Default: uniform@1/4; of eviction heads all F.", metavar="PATTERN"),
    ] = None,
    training: Annotated[
        list[str] | None, typer.Option(help="Training source: file, folder, hub id; repeatable.", metavar="SOURCE")
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        typer.Option(help="Held-out source; repeatable. Default: the training sources.", metavar="SOURCE"),
    ] = None,
    chat_template: data_flags.ChatTemplate = None,
    turns: data_flags.TurnsFlag = "auto",
    skip_bad_rows: data_flags.SkipBadRows = 0,
    dry_run: data_flags.DryRun = False,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens a sequence; more than {FIRST_CHOICE}. Default: 4 times that.", callback=bounded.tokens()
        ),
    ] = None,
    num_sequences: Annotated[
        int | None,
        typer.Option(
            help="Training sequences; used again when all were seen. Default: 16384.",
            callback=bounded.within(1, 100_000_000),
        ),
    ] = None,
    num_eval_sequences: Annotated[
        int | None, typer.Option(help="Held-out sequences. Default: 32.", callback=bounded.sequences())
    ] = None,
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
    heads_lr: Annotated[
        float, typer.Option(help="eviction: peak learning rate of the heads.", callback=bounded.rate())
    ] = 1e-2,
    body: Annotated[
        bool,
        typer.Option(
            "--body/--no-body",
            help="eviction: train the model, too, by its own loss; else heads alone, by the divergence from it.",
        ),
    ] = False,
    bias: Annotated[
        BiasUse,
        typer.Option(
            help="eviction: always: added to the products wherever pages are chosen (ED-DMA). training: for the heads'"
            " gradients alone (S-DMA)."
        ),
    ] = "always",
    query_pages: Annotated[
        int,
        typer.Option(
            help="eviction: pages that a query chooses; the heads choose the others.", callback=bounded.tokens()
        ),
    ] = 8,
    pages: Annotated[
        int | None, typer.Option(help=f"eviction: {flags.PAGES}. Default: 64.", callback=bounded.tokens(2))
    ] = None,
    page_tokens: Annotated[
        int | None, typer.Option(help="eviction: tokens of a page. Default: 64.", callback=bounded.tokens())
    ] = None,
    recent_pages: Annotated[
        int | None,
        typer.Option(help="eviction: newest pages, always attended to. Default: one in 4.", callback=bounded.tokens(0)),
    ] = None,
    sink_pages: Annotated[
        int | None, typer.Option(help="eviction: first pages, likewise. Default: 1.", callback=bounded.tokens(0))
    ] = None,
    schedule: Annotated[
        Schedule, typer.Option(help="cosine: to a tenth. wsd: stays, and falls to 0 over the last fifth.")
    ] = "cosine",
    ramp_steps: Annotated[
        int, typer.Option(help="Steps of the ramp that each stage begins with.", callback=bounded.steps(0))
    ] = 50,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences a step. Default: 16.", callback=bounded.batch())
    ] = None,
    micro_batch_size: Annotated[
        int, typer.Option(help="Sequences a forward of one process.", callback=bounded.batch())
    ] = 1,
    weight_decay: Annotated[float, typer.Option(help="Of the body's matrices.", callback=bounded.within(0, 1e6))] = 0.1,
    max_norm: Annotated[
        float, typer.Option(help="To which gradients are clipped.", callback=bounded.within(0, 1e6))
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Order of the training sequences.", callback=bounded.seed())] = 0,
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
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between held-out evaluations.", callback=bounded.steps())
    ] = 100,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.", callback=bounded.steps())] = 100,
    show_every: Annotated[
        int, typer.Option(help="Steps between lines on the terminal; the log has all.", callback=bounded.steps())
    ] = 10,
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
    metrics.json. --train eviction trains NOSA's eviction heads of a dense model instead (arXiv 2510.13602).
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

        if is_demo and train == "eviction":
            raise SearchError("--train eviction needs the --model of a dense model")
        if is_demo and training is None:
            training, evaluation = list(demo.CALIBRATION), evaluation or list(demo.EVALUATION)
        if not training:
            raise SearchError("--training is missing, expected a file, folder or hub id with text")
        name = model or str(demo.MODEL)
        selection = None
        if train == "eviction":
            [plain] = flags.selections_of(
                pages="" if pages is None else str(pages),
                page_tokens=page_tokens,
                recent_pages=recent_pages,
                sink_pages=sink_pages,
                score="compressed_keys",
            )
            nosa = Steps(policy="nosa", query_pages=query_pages, importance="heads")
            selection = replace(plain, steps=nosa)
        description = describe_model(name)
        if selection is not None and not description.dense:
            raise SearchError(f"--train eviction is for dense models; {description.name} has indexers that choose")
        description = describe_model(name, selection)
        defaults = HEADS if train == "eviction" else DEMO if is_demo else Defaults()
        if selection is None:
            chosen = PatternSpec.read(pattern or "uniform@1/4").pattern(description)
            chosen.check_plain("is not trained for yet")
        else:
            letters = pattern or FULL * description.num_layers
            chosen = replace(PatternSpec.read(letters, selection).pattern(description), selection=selection)
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
        common: dict[str, Any] = {
            "pattern": chosen,
            "lr": defaults.lr if lr is None else lr,
            "schedule": schedule,
            "ramp_steps": ramp_steps,
            "batch_size": batch_size or defaults.batch_size,
            "micro_batch_size": micro_batch_size,
            "weight_decay": weight_decay,
            "max_norm": max_norm,
            "seed": seed,
        }
        number = defaults.steps if steps is None else steps
        process.let_work_end()
        folders = Folders(folder, restart, "indexcache-distill" + (" --train eviction" if selection else ""))
        if train == "eviction":
            from indexcache_search.lab.eviction import run as eviction
            from indexcache_search.lab.eviction.settings import EvictionSettings

            heads = EvictionSettings(use=bias, body=body, steps=number, heads_lr=heads_lr, **common)
            result, written = eviction.run(name, data, heads, runtime, folders, console)
            table = eviction.terminal_table
        else:
            settings = Settings(
                loss=loss,
                warmup_steps=defaults.warmup_steps if warmup_steps is None else warmup_steps,
                sparse_steps=number,
                warmup_lr=warmup_lr,
                indexer_lr=defaults.indexer_lr if indexer_lr is None else indexer_lr,
                **common,
            )
            result, written = run(name, data, settings, runtime, folders, console)
            table = terminal_table
        if not result:
            return  # another process speaks
        if json_:
            sys.stdout.write(json.dumps(result, indent=1) + "\n")
            return
        out = results()
        out.print(table(result))
        out.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True)
        out.print(f"Next: {serving(folder / 'pattern.yaml', folder / 'model')}", soft_wrap=True)
