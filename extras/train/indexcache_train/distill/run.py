"""A whole distillation run: from a model, a pattern and data to a checkpoint for serving."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedConfig

from indexcache_search.errors import JournalError, SearchError
from indexcache_search.hf.device import resolve_attention
from indexcache_search.hf.loading import check_seq_len, describe_model, load_model, read_config, set_quiet
from indexcache_train.distill import memory
from indexcache_train.distill.conversion import convert
from indexcache_train.distill.curves import draw
from indexcache_train.distill.dense_mla import DenseStart
from indexcache_train.distill.export import check_source, export, with_sources
from indexcache_train.distill.session import session
from indexcache_train.distill.settings import DistillSettings, Stage, TrainingRuntime
from indexcache_train.distill.task import StageTask
from indexcache_train.training.processes import Processes, joined
from indexcache_train.training.recompute import checkpoint_gradients
from indexcache_train.training.sets import TrainingData
from indexcache_train.training.settings import Folders
from sglang_indexcache import ModelLayers
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.families import family_of
from sglang_indexcache.families.dsa.checkpoint import DsaCheckpoint
from sglang_indexcache.model.files import ModelFiles

STAGES: Mapping[Stage, str] = {"warmup": "dense warm-up", "sparse": "sparse training"}
"""Names of the stages for users, in order."""


def run(
    model: str,
    data: TrainingData,
    settings: DistillSettings,
    runtime: TrainingRuntime,
    folders: Folders,
    *,
    console: Console,
    start: DenseStart | None = None,
) -> tuple[Mapping[str, Any], list[Path]]:
    """Train `model` for a pattern, write the results, and return the metrics and the files written.

    All processes of a launch call this; only the first writes and prints. With `start` the model is a dense one, and
    gets indexers first.

    Raises:
        IndexCacheError: if a request can't be fulfilled.
        NonFiniteLossError: if a loss is NaN or infinite; the last good checkpoint stays.
    """
    set_quiet()
    if start is None:
        description, config = describe_model(model), read_config(model)
        locked = Checkpoint.read(model).locked
    else:
        start = start.made_for(settings.pattern)
        description, config = start.description, start.pretrained_config
        locked = description.locked
    _check_model(model, description, config, data, settings, runtime=runtime, locked=locked)
    check_source(model)
    with ExitStack() as stack:
        processes = stack.enter_context(joined(runtime.device, runtime.dtype))
        settings.check(processes.count)
        attention = resolve_attention(runtime.attention, processes.device)
        stages = [stage for stage in STAGES if len(range(*settings.range(stage)))]
        if runtime.check_memory:
            check_memory(config, settings, data, runtime, processes)
        keep_shared = runtime.keep_shared
        if keep_shared is None:  # transformers runs all indexers of DeepSeek-V3.2
            keep_shared = "DeepseekV32" in description.architecture
        also: dict[str, Any] = {"attention": attention, "processes": processes.count}
        if start is not None:
            also["indexers"] = start.as_dict()
        run = stack.enter_context(
            session(
                model,
                description,
                data,
                settings,
                settings.steps,
                runtime=runtime,
                paths=folders,
                console=console,
                processes=processes,
                also=also,
                names=STAGES,
            )
        )
        done, base, origin = run.done, model, run.files.folder
        finished = done >= settings.steps and run.folders.is_whole(folders.model, processes)
        if start is not None and not finished:
            if not run.folders.is_whole(folders.converted, processes) and processes.first:
                with run.folders.exported(folders.converted) as unfinished:
                    convert(run.files.folder, start, settings.seed, unfinished)
                    run.check_unchanged()
            processes.wait()
            base, origin = str(folders.converted), folders.converted
        for stage in [] if finished else stages:
            first, last = settings.range(stage)
            result = folders.model if stage == stages[-1] else folders.warmed_up
            if stage != stages[-1] and done >= last and run.folders.is_whole(result, processes):
                continue
            if done > last:
                raise JournalError(f"{result}: is not whole, and was left behind; --restart trains anew")
            run.progress.begin(stage)
            source = str(folders.warmed_up) if first else base
            loaded, dtypes = _load(source, description, processes, run.files if source == model else None)
            if runtime.gradient_checkpointing and stage == "sparse":
                checkpoint_gradients(loaded)  # in the warm-up the frozen body keeps no activations anyway
            task = StageTask(
                processes,
                loaded if processes.bfloat16 else loaded.float(),
                settings,
                stage,
                run.train,
                held_out=run.held_out,
                kernels="auto" if attention == "kernels" else None,
            )
            if not done and start is not None:
                run.loop.report({"step": 0, "stage": "original", "dense": True, **task.evaluate(dense=True)})
            elif not done:
                for name, pattern in (("original", description.native), ("training-free", settings.pattern)):
                    run.loop.report({"step": 0, "stage": name, **task.evaluate(pattern)})
            run.loop.train(task, done)
            # The checkpoint between the stages has the model's own pattern and all of its indexers.
            pattern, keep = (settings.pattern, keep_shared) if stage == stages[-1] else (description.native, True)
            run.check_unchanged()
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights: dict[str, Any] = get_model_state_dict(task.model, options=options)  # of all processes
            if processes.first:
                weights = {name: value.to(dtypes[name]) for name, value in weights.items()}
                if start is not None and stage == stages[-1]:
                    weights = with_sources(task.model, weights, pattern)
                with run.folders.exported(result) as unfinished:
                    export(
                        task.model,
                        weights,
                        folders.warmed_up if first else origin,
                        pattern,
                        unfinished,
                        keep_shared=keep,
                    )
            processes.wait()
            done = max(done, last)
            del loaded, task, weights
            gc.collect()
            torch.cuda.empty_cache()
        run.check_unchanged()
        curves = {} if run.log is None else {"curves.svg": draw(run.log.records, settings.warmup_steps)}
        return run.write(description, settings, "distilled", curves), run.folders.results.written


def check_memory(
    config: PreTrainedConfig,
    settings: DistillSettings,
    data: TrainingData,
    runtime: TrainingRuntime,
    processes: Processes,
) -> None:
    """Refuse a run of which a stage would not fit into memory, before anything large is loaded.

    Raises:
        SearchError: with the figures.
    """
    for stage in STAGES:
        if not len(range(*settings.range(stage))):
            continue
        need = memory.estimate(
            config,
            settings.pattern,
            stage,
            seq_len=data.seq_len,
            micro_batch_size=settings.micro_batch_size,
            processes=processes.count,
            bfloat16=processes.bfloat16,
            gradient_checkpointing=runtime.gradient_checkpointing,
            kernels=resolve_attention(runtime.attention, processes.device) == "kernels",
        )
        memory.check(need, memory.available(processes.device), processes.device)


def _check_model(
    model: str,
    description: ModelLayers,
    config: PreTrainedConfig,
    data: TrainingData,
    settings: DistillSettings,
    *,
    runtime: TrainingRuntime,
    locked: Collection[int],
) -> None:
    """Refuse a model that can't be trained as requested, before anything large is loaded."""
    if not isinstance(family_of(description.architecture).checkpoint, DsaCheckpoint):
        raise SearchError(f"{model}: distillation does not train {description.architecture}, expected a DSA model")
    check_seq_len(data.seq_len, config)
    settings.pattern.check_fits(description.num_layers, locked)
    if getattr(config, "quantization_config", None) is not None:
        raise SearchError(f"{model}: its weights are quantised, expected a bfloat16 or float32 checkpoint")
    if config.attention_dropout:
        raise SearchError(f"{model}: attention_dropout is {config.attention_dropout}, expected 0")
    if config.model_type == "deepseek_v32" and runtime.keep_shared is False:
        raise SearchError(
            "--write shared_indexers=drop: transformers runs every indexer of a deepseek_v32 model, whatever its"
            " config.json says, and would make up the missing ones; expected keep"
        )


def _load(
    source: str, description: ModelLayers, processes: Processes, files: ModelFiles | None
) -> tuple[Any, dict[str, torch.dtype]]:
    """Load the model in the dtypes of its checkpoint, and return it with these; the first process reads the weights.

    Raises:
        ModelConfigError: if the model differs from `files`.
    """
    model: Any
    if processes.first:
        model, found = load_model(source, description, "auto")
        if files is not None:
            files.check_loaded(found)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read_config(source))
    dtypes: dict[str, torch.dtype]
    dtypes, *_ = processes.gather({name: value.dtype for name, value in model.state_dict().items()})
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    return model, dtypes
