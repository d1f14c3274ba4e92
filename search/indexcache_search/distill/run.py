"""A whole distillation run: from a model, a pattern and data to a checkpoint that can be served."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedConfig

from indexcache_kernels.backends import Backend
from indexcache_search.calibration import TokenReader, build_training_sets
from indexcache_search.distill import memory
from indexcache_search.distill.checkpoints import Checkpoints
from indexcache_search.distill.data import load_set, save_set
from indexcache_search.distill.export import export, trained_pattern_file
from indexcache_search.distill.log import TrainingLog
from indexcache_search.distill.model import Stage
from indexcache_search.distill.progress import TrainingProgress
from indexcache_search.distill.result import collect
from indexcache_search.distill.settings import Settings
from indexcache_search.distill.sharding import create_accelerator
from indexcache_search.distill.trainer import Intervals, StageTrainer
from indexcache_search.engines.transformers import (
    check_seq_len,
    describe_model,
    load_tokenizer,
    read_config,
    resolve_attention,
    set_quiet,
)
from indexcache_search.errors import JournalError, NonFiniteLossError, SearchError
from indexcache_search.search import today
from indexcache_search.tokens import TokenSet
from sglang_indexcache import DsaModel, __version__
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.pattern_file import write_atomically

STAGES: tuple[Stage, ...] = ("warmup", "sparse")


@dataclass(frozen=True)
class Data:
    """Sources and sizes of the training and the held-out set."""

    training: tuple[str, ...]
    evaluation: tuple[str, ...]
    seq_len: int
    num_sequences: int
    num_eval_sequences: int


@dataclass(frozen=True)
class Runtime:
    """How a run trains; see `indexcache-distill --help`.

    Attributes:
        device: `auto` or `cpu`.
        dtype: that of the computations: `auto`, `float32` or `bfloat16`; what trains is float32 in any case.
        attention: `auto`, `naive` or `kernels`.
        keep_shared: write the indexers of S layers, too; None: where transformers needs them.
    """

    device: str
    dtype: str
    attention: str
    gradient_checkpointing: bool
    check_memory: bool
    keep_shared: bool | None
    intervals: Intervals
    tensorboard: bool


@dataclass(frozen=True)
class Folders:
    """Where a run writes; `restart` discards what an earlier one left there."""

    output: Path
    restart: bool

    @property
    def work(self) -> Path:
        return self.output / "work"

    @property
    def model(self) -> Path:
        return self.output / "model"

    def of_stage(self, last: bool) -> Path:
        """Where a stage's model goes."""
        return self.model if last else self.work / "warmed-up"


def run(
    model: str, data: Data, settings: Settings, runtime: Runtime, folders: Folders, console: Console
) -> Mapping[str, Any]:
    """Train `model` for a pattern; write model/, pattern.yaml, log.jsonl and metrics.json; return the metrics.

    Runs in every process of a launch; the first one writes and speaks.

    Raises:
        IndexCacheError: if something asked for can't be done.
        NonFiniteLossError: if a loss is NaN or infinite; the last good checkpoint stays.
    """
    set_quiet()
    description, config = describe_model(model), read_config(model)
    check_seq_len(data.seq_len, config)
    _check_model(model, description, config, settings, runtime)
    accelerator = _accelerator(runtime, config)
    settings.check(accelerator.num_processes)
    attention = _attention(settings, runtime, accelerator)
    if not accelerator.is_main_process:
        console = Console(quiet=True)
    stages = [stage for stage in STAGES if len(range(*settings.range(stage)))]
    if runtime.check_memory:
        for stage in stages:
            _check_memory(config, settings, stage, data, runtime, attention, accelerator)
    with _work_folder(folders, _identity(description, data, settings, runtime, attention, accelerator), accelerator):
        train, held_out = _load_data(model, description, config, data, settings, folders, accelerator)
        checkpoints = Checkpoints(folders.work / "checkpoints", accelerator)
        done = checkpoints.latest()
        events = folders.output / "tensorboard" if runtime.tensorboard else None
        with (
            TrainingLog(folders.output / "log.jsonl", done, events) if accelerator.is_main_process else nullcontext()
        ) as log:
            with TrainingProgress(console, done, settings.steps) as progress, _last_good(checkpoints):
                for stage in stages:
                    first, last = settings.range(stage)
                    result = folders.of_stage(stage == stages[-1])
                    if done >= last and result.is_dir():
                        continue
                    progress.begin(stage)
                    source = str(folders.of_stage(last=False)) if first else model
                    loaded = _load(source, runtime.gradient_checkpointing and stage == "sparse")
                    dtypes = {name: value.dtype for name, value in loaded.state_dict().items()}
                    if not _bfloat16(runtime):
                        loaded.float()
                    kernels: Backend | None = "auto" if attention == "kernels" else None
                    trainer = StageTrainer(accelerator, loaded, settings, stage, train, held_out, kernels)
                    if not done:
                        trainer.evaluate_before(description.native, log, progress.watch)
                    trainer.train(done, checkpoints, log, progress.watch, runtime.intervals)
                    _export(trainer.model, dtypes, source, description, settings, result, runtime, accelerator)
                    done = max(done, last)
                    accelerator.free_memory()
                    del loaded, trainer
            if log is None:
                return {}
            records = log.records
        result_metrics = collect(records, held_out, description, settings, _versions())
        name = f"{description.name}-distilled"
        file = trained_pattern_file(folders.model, name, settings.pattern, _versions(), today()["created"])
        file.save(folders.output / "pattern.yaml")
        write_atomically(folders.output / "metrics.json", json.dumps(result_metrics, indent=1) + "\n")
    return result_metrics


def _check_model(
    model: str, description: DsaModel, config: PreTrainedConfig, settings: Settings, runtime: Runtime
) -> None:
    """Refuse what can't be trained, before anything is loaded."""
    settings.pattern.check_fits(description.num_layers, Checkpoint.read(model).locked)
    if getattr(config, "quantization_config", None) is not None:
        raise SearchError(f"{model}: its weights are quantised, expected a bfloat16 or float32 checkpoint")
    if config.attention_dropout:
        raise SearchError(f"{model}: attention_dropout is {config.attention_dropout}, expected 0")
    if config.model_type == "deepseek_v32" and runtime.keep_shared is False:
        raise SearchError(
            "--shared-indexers drop: transformers runs every indexer of a deepseek_v32 model, whatever its config.json"
            " says, and would make up the missing ones; expected keep"
        )


def _accelerator(runtime: Runtime, config: PreTrainedConfig) -> Accelerator:
    if runtime.device not in ("auto", "cpu"):
        raise SearchError(f"--device is {runtime.device}, expected auto or cpu; CUDA_VISIBLE_DEVICES chooses a GPU")
    if runtime.dtype not in ("auto", "float32", "bfloat16"):
        raise SearchError(f"--dtype is {runtime.dtype}, expected auto, float32 or bfloat16")
    return create_accelerator(config.model_type, runtime.device == "cpu", _bfloat16(runtime))


def _attention(settings: Settings, runtime: Runtime, accelerator: Accelerator) -> str:
    if settings.loss == "averaged" and runtime.attention == "kernels":
        raise SearchError("--loss averaged needs the whole attention of a layer, expected --attention naive with it")
    wanted = "naive" if settings.loss == "averaged" and runtime.attention == "auto" else runtime.attention
    return resolve_attention(wanted, accelerator.device)


def _bfloat16(runtime: Runtime) -> bool:
    on_gpu = runtime.device == "auto" and torch.cuda.is_available()
    return runtime.dtype == "bfloat16" or (runtime.dtype == "auto" and on_gpu)


def _check_memory(
    config: PreTrainedConfig,
    settings: Settings,
    stage: Stage,
    data: Data,
    runtime: Runtime,
    attention: str,
    accelerator: Accelerator,
) -> None:
    need = memory.estimate(
        config,
        settings.pattern,
        stage,
        seq_len=data.seq_len,
        micro_batch_size=settings.micro_batch_size,
        processes=accelerator.num_processes,
        bfloat16=_bfloat16(runtime),
        gradient_checkpointing=runtime.gradient_checkpointing,
        kernels=attention == "kernels",
    )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory.check(need, memory.available(accelerator.device, local), accelerator.device)


def _identity(
    description: DsaModel, data: Data, settings: Settings, runtime: Runtime, attention: str, accelerator: Accelerator
) -> dict[str, Any]:
    """What the trained weights depend on."""
    return {
        "model": description.name,
        "config_sha256": description.config_sha256,
        **settings.as_dict(),
        **asdict(data),
        "dtype": "bfloat16" if _bfloat16(runtime) else "float32",
        "attention": attention,
        "processes": accelerator.num_processes,
    }


@contextmanager
def _work_folder(folders: Folders, identity: Mapping[str, Any], accelerator: Accelerator) -> Iterator[None]:
    """Hold the work folder for this run alone, and see that it belongs to it."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        yield
        return
    path = folders.work / "run.json"
    folders.work.mkdir(parents=True, exist_ok=True)
    with (folders.output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalError(f"{folders.output}: another run is using this folder") from None
        if folders.restart:
            for folder in (folders.work, folders.model, folders.output / "tensorboard"):
                shutil.rmtree(folder, ignore_errors=True)
            (folders.output / "log.jsonl").unlink(missing_ok=True)
        wanted = json.loads(json.dumps(identity))
        if path.is_file():
            found = json.loads(path.read_text())
            for key in sorted({*found, *wanted}):
                if found.get(key) != wanted.get(key):
                    raise JournalError(
                        f"{path}: belongs to a run with {key} {found.get(key)}, now it is {wanted.get(key)};"
                        " choose another --output, or --restart to discard it"
                    )
        write_atomically(path, json.dumps(wanted, indent=1) + "\n")
        accelerator.wait_for_everyone()
        yield


def _load_data(
    model: str,
    description: DsaModel,
    config: PreTrainedConfig,
    data: Data,
    settings: Settings,
    folders: Folders,
    accelerator: Accelerator,
) -> tuple[TokenSet, TokenSet]:
    """Both sets, read once and kept as token ids, so that a resumed run trains on the same ones."""
    places = [folders.work / "data" / name for name in ("training", "held-out")]
    with accelerator.main_process_first():
        if any(load_set(place) is None for place in places):
            sets = build_training_sets(
                TokenReader(lambda: load_tokenizer(model), config.vocab_size, data.seq_len),
                description,
                data.training,
                data.evaluation,
                seq_len=data.seq_len,
                num_training=data.num_sequences,
                num_evaluation=data.num_eval_sequences,
                seed=settings.seed,
            )
            for tokens, place in zip(sets, places, strict=True):
                save_set(tokens, place)
    train, held_out = (load_set(place) for place in places)
    assert train is not None and held_out is not None
    return train, held_out


def _load(source: str, gradient_checkpointing: bool) -> Any:
    """The model, in the dtypes of its checkpoint; in the warm-up the frozen body keeps no activations anyway."""
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    except (OSError, ValueError, RuntimeError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SearchError(f"{source}: can't be loaded: {line}") from None
    if gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def _export(
    model: Any,
    dtypes: Mapping[str, torch.dtype],
    source: str,
    description: DsaModel,
    settings: Settings,
    folder: Path,
    runtime: Runtime,
    accelerator: Accelerator,
) -> None:
    """Write the model of a stage; that of the warm-up keeps all its indexers and its pattern."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    if accelerator.is_main_process:
        weights = {name: value.to(dtypes[name]) for name, value in weights.items()}
        last = folder.name == "model"
        keep = runtime.keep_shared if runtime.keep_shared is not None else "DeepseekV32" in description.architecture
        export(model, weights, source, settings.pattern if last else description.native, folder, keep or not last)
    accelerator.wait_for_everyone()


@contextmanager
def _last_good(checkpoints: Checkpoints) -> Iterator[None]:
    try:
        yield
    except NonFiniteLossError as error:
        step = checkpoints.latest()
        kept = f"the last good checkpoint is {checkpoints.path(step)}" if step else "there is no checkpoint yet"
        raise NonFiniteLossError(f"{error}; {kept}") from None


def _versions() -> dict[str, str]:
    return {
        "sglang_indexcache": __version__,
        **{name: version(name) for name in ("accelerate", "torch", "transformers")},
    }
