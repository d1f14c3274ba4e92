"""The command line: indexcache-distill."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from indexcache_search import demo
from indexcache_search.cli import options
from indexcache_search.cli.bounded import BATCH, TOKENS
from indexcache_search.cli.command import Config, OptionNeed, Version, application, number, option, running, settings
from indexcache_search.cli.help import MORE
from indexcache_search.console import results, serving
from indexcache_search.errors import SearchError
from indexcache_train.distill.settings import DistillSettings, IndexerSize, Loss, Schedule, dense_architecture
from indexcache_train.options import (
    MILLION,
    RATE,
    STEPS,
    STEPS_OR_NONE,
    TRAINING_SEQUENCES,
    WIDTH,
    NumEvalSequences,
    RowsOfDocuments,
    Training,
)
from sglang_indexcache import process
from sglang_indexcache.checkpoint import checkpoint
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.pattern import parse_retention
from sglang_indexcache.pattern_file.pattern_name import GRAMMAR, PatternSpec
from sglang_indexcache.version import requirement

DEMO: dict[str, Any] = {"warmup_steps": 20, "sparse_steps": 40, "indexer_lr": 1e-3, "lr": 2e-4, "batch_size": 4}
"""Settings of the demo. Defaults of a full run are DeepSeek-V3.2's and the paper's."""

EPILOG = f"""
Examples:

\b
  indexcache-distill
      The demo: 60 small steps on the demo model, uniform 1/4. Two to three minutes on two cores.

\b
  indexcache-distill --model ./my-dsa-model --pattern uniform@1/4 --training sft.jsonl --seq-len 32768
      One GPU. Data as for indexcache-search (docs/reference/data.md); --dry-run says what is read of them, and ends.

\b
  torchrun --nproc-per-node 8 -m indexcache_train --model ./my-dsa-model \\
        --pattern deploy/mine/pattern.yaml@1/4 --training sft.jsonl --seq-len 32768
      Eight GPUs: weights, gradients and optimizer are sharded with FSDP2.

\b
  indexcache-distill --model ./my-dense-model --index-topk 2048 --search-first 1/4 --training sft.jsonl --seq-len 32768
      From a dense model: indexers in all layers, a search, and training with the pattern that it found.

\b
  python -m sglang_indexcache.launch_server --model-path OUTPUT/model --indexcache-pattern OUTPUT/pattern.yaml
      Serve what came out.

Run the same command again to go on after a kill, a crash or Ctrl-C: the losses are the same as without it.

{MORE}
{exit_codes("the run failed (a loss was not finite)")}
"""


@dataclass(frozen=True, kw_only=True)
class WarmupChoice:
    """Length and learning rate of a training stage."""

    steps: Annotated[int, STEPS_OR_NONE] | None = None
    lr: Annotated[float, RATE] | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if self.steps == 0 and key != "steps" and value is not None:
                raise SearchError(f"{key} needs steps above 0")


@dataclass(frozen=True, kw_only=True)
class SparseChoice(WarmupChoice):
    """Length and learning rates of the stage in which everything trains."""

    indexer_lr: Annotated[float, RATE] | None = None
    weight_decay: Annotated[float, MILLION] | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """Learning rate schedule and gradient clipping."""

    schedule: Schedule = "cosine"
    ramp_steps: Annotated[int, STEPS_OR_NONE] = 50
    max_norm: Annotated[float, MILLION] = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainingEngineChoice:
    """Settings of training that do not depend on the method; see `TrainingRuntime`."""

    gradient_checkpointing: bool = True
    micro_batch: Annotated[int, BATCH] = 1


@dataclass(frozen=True, kw_only=True)
class DistillEngineChoice(TrainingEngineChoice):
    """Settings of how a DSA model is trained."""

    attention: Literal["auto", "naive", "kernels"] = "auto"
    memory_check: bool = True


@dataclass(frozen=True, kw_only=True)
class EveryChoice:
    """Steps between evaluations, checkpoints and lines; see `Intervals`."""

    evaluate: Annotated[int, STEPS] = 100
    checkpoint: Annotated[int, STEPS] = 100
    show: Annotated[int, STEPS] = 10


@dataclass(frozen=True, kw_only=True)
class WriteChoice:
    """Optional outputs beside model, pattern and metrics."""

    shared_indexers: Literal["auto", "drop", "keep"] = "auto"
    tensorboard: bool = False


ENGINE_KEYS = (
    "gradient_checkpointing (no: keep what layers computed for the gradients), micro_batch (sequences of a forward of"
    " one process; 1)"
)
Device = Annotated[Literal["auto", "cpu"], option("CUDA_VISIBLE_DEVICES chooses a GPU.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], option("Of computations; what trains is float32 anyway.")]
Every = Annotated[
    EveryChoice | None,
    settings(EveryChoice, "Steps between evaluations (evaluate; 100), checkpoints (100) and lines shown (show; 10)."),
]


def _dense(given: Any) -> bool:
    """Return whether the model is a dense one with MLA, by its config.json."""
    return bool(given["model"] and dense_architecture(checkpoint.read_config(given["model"])[0]))


def _share(value: str | None) -> str | None:
    """Refuse what is no share of layers."""
    try:
        parse_retention(value or "1")
    except IndexCacheError as error:
        raise typer.BadParameter(str(error)) from None
    return value


NEEDS = {
    "pattern": (OptionNeed("a run without --search-first", lambda given: given["search_first"] is None),),
    **dict.fromkeys(("index_heads", "index_dim", "index_topk"), (OptionNeed("a dense model with MLA", _dense),)),
}


def distill(
    context: typer.Context,
    *,
    model: options.Model = None,
    pattern: Annotated[
        str, option(f"What the model is trained for: {GRAMMAR}.", "--pattern", metavar="PATTERN")
    ] = "uniform@1/4",
    search_first: Annotated[
        str | None,
        option(
            "Search the pattern in which this share of the layers stays F, then train for it. A dense model first"
            " trains with indexers in all.",
            metavar="SHARE",
            callback=_share,
        ),
    ] = None,
    index_heads: Annotated[
        int | None, number("Heads of the indexers that a dense model gets. Default: 32.", WIDTH)
    ] = None,
    index_dim: Annotated[int | None, number("Their dimensions. Default: 128, all that SGLang serves.", WIDTH)] = None,
    index_topk: Annotated[int | None, number("Tokens that they select. Default: 2048.", TOKENS)] = None,
    training: Training = None,
    evaluation: options.HeldOutOrSame = None,
    rows: RowsOfDocuments = None,
    dry_run: options.DryRun = False,
    seq_len: options.SeqLen = None,
    num_sequences: Annotated[
        int | None,
        number("Training sequences, used again when all were seen. Default: 16384 or all.", TRAINING_SEQUENCES),
    ] = None,
    num_eval_sequences: NumEvalSequences = None,
    seed: options.Seed = 0,
    loss: Annotated[
        Loss,
        option(
            "multi: each indexer learns from all layers it serves (Eq. 1). own: from its own layer only, the ablation.",
        ),
    ] = "multi",
    warmup: Annotated[
        WarmupChoice | None,
        settings(
            WarmupChoice,
            "Dense steps, in which only indexers train. Keys: steps (1000; 0: none), lr (peak learning rate; 1e-3).",
        ),
    ] = None,
    sparse: Annotated[
        SparseChoice | None,
        settings(
            SparseChoice,
            "Sparse steps, in which everything trains. Keys: steps (4000; 0: none), lr (peak learning rate of the body;"
            " 7.3e-6), indexer_lr (of the indexers; 7.3e-6), weight_decay (of the body's matrices; 0.1).",
        ),
    ] = None,
    optimizer: Annotated[
        OptimizerChoice | None,
        settings(
            OptimizerChoice,
            "Keys: schedule (cosine: to a tenth; wsd: stays, and falls to 0 over the last fifth; constant), ramp_steps"
            " (of the ramp that a stage begins with; 50), max_norm (to which gradients are clipped; 1).",
        ),
    ] = None,
    batch_size: Annotated[int | None, number("Sequences of a step. Default: 16.", BATCH)] = None,
    engine: Annotated[
        DistillEngineChoice | None,
        settings(
            DistillEngineChoice,
            f"Keys: {options.ATTENTION}, {ENGINE_KEYS}, memory_check (no: load without an estimate of the memory).",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    every: Every = None,
    write: Annotated[
        WriteChoice | None,
        settings(
            WriteChoice,
            "Keys: shared_indexers (of S layers: keep, drop, or auto: drop, but for deepseek_v32), tensorboard (yes:"
            " event files in OUTPUT/tensorboard).",
        ),
    ] = None,
    output: Annotated[Path | None, option("Folder of the results. Default: indexcache-distilled-NAME.")] = None,
    restart: options.Restart = False,
    config: Config = None,
    version: Version = False,
) -> None:
    """Train a DSA model for a pattern, so that each remaining indexer serves all the layers that reuse it.

    Training-aware IndexCache (paper, Section 3.2). Writes model/, pattern.yaml, log.jsonl, curves.svg and
    metrics.json. Without options it trains the demo model.
    """
    first, second, how = warmup or WarmupChoice(), sparse or SparseChoice(), optimizer or OptimizerChoice()
    runs, beside = engine or DistillEngineChoice(), write or WriteChoice()
    main, is_demo = os.environ.get("RANK", "0") == "0", model is None
    with running(context, NEEDS, quiet=not main) as console:
        for package in ("psutil", "torch", "transformers"):
            if find_spec(package) is None:
                raise SearchError(f"{package} is not installed; expected: pip install {requirement('train')}")
        if is_demo and training is None:
            training, evaluation = list(demo.CALIBRATION), evaluation or list(demo.EVALUATION)
        if not training:
            raise SearchError("--training is missing, expected a file, folder or hub id with text")
        name, spec, row_options = model or str(demo.MODEL), PatternSpec.read(pattern), options.row_options(rows)
        from indexcache_search.data.packing import Wish
        from indexcache_search.hf.loading import describe_model
        from indexcache_train.distill.dense_mla import DenseStart
        from indexcache_train.distill.result import terminal_table
        from indexcache_train.distill.run import run
        from indexcache_train.distill.settings import TrainingRuntime
        from indexcache_train.training.sets import TrainingData, show_data
        from indexcache_train.training.settings import Folders, Intervals

        sizes = {"heads": index_heads, "dim": index_dim, "topk": index_topk}
        wanted = {key: value for key, value in sizes.items() if value is not None}
        start = DenseStart.read(name, IndexerSize(**wanted))
        description = describe_model(name) if start is None else start.description
        chosen = spec.pattern(description)
        chosen.check_plain("is not trained for yet")
        data = TrainingData(
            training=tuple(training),
            evaluation=tuple(evaluation or training),
            seq_len=seq_len or (512 if is_demo else 4 * description.first_sparse_position),
            num_sequences=num_sequences or Wish(64 if is_demo else 16384),
            num_eval_sequences=num_eval_sequences or Wish(24 if is_demo else 32),
            rows=row_options,
            apart=rows is not None and rows.documents == "apart",
        )
        if dry_run:
            if main:
                show_data(name, description, data, seed)
            return
        runtime = TrainingRuntime(
            device=device,
            dtype=dtype,
            attention=runs.attention,
            gradient_checkpointing=runs.gradient_checkpointing,
            check_memory=runs.memory_check,
            keep_shared={"auto": None, "drop": False, "keep": True}[beside.shared_indexers],
            intervals=Intervals(**vars(every or EveryChoice())),
            tensorboard=beside.tensorboard,
        )
        given = {
            "warmup_steps": first.steps,
            "warmup_lr": first.lr,
            "sparse_steps": second.steps,
            "lr": second.lr,
            "indexer_lr": second.indexer_lr,
            "weight_decay": second.weight_decay,
            "batch_size": batch_size,
        }
        what = DistillSettings(
            pattern=chosen,
            loss=loss,
            micro_batch_size=runs.micro_batch,
            seed=seed,
            **vars(how),
            **(DEMO if is_demo else {}) | {key: value for key, value in given.items() if value is not None},
        )
        folder = output or Path(f"indexcache-distilled-{'demo' if is_demo else Path(name).name}")
        process.let_work_end()
        if search_first is None:
            result, written = run(name, data, what, runtime, Folders(folder, restart), console=console, start=start)
        else:
            from indexcache_train.distill import search_first as both

            share, places = parse_retention(search_first), Folders(folder, restart)
            result, written = both.run(name, data, what, share, runtime, folders=places, console=console, start=start)
            folder = folder / both.TRAINED
        if not result:
            return  # only the first process prints
        out = results()
        out.print(terminal_table(result))
        out.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True)
        out.print(f"Next: {serving(folder / 'pattern.yaml', folder / 'model', chosen.selection)}", soft_wrap=True)


app = application({"indexcache-distill": distill}, EPILOG)
