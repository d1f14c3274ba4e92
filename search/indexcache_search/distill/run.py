"""A whole distillation run: from a model, a pattern and data to a checkpoint for serving."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from indexcache_search.distill.curves import draw
from indexcache_search.distill.export import check_source, export
from indexcache_search.distill.preflight import check_memory, check_model, computes_in_bfloat16
from indexcache_search.distill.session import session
from indexcache_search.distill.settings import DistillSettings, Stage, TrainingRuntime
from indexcache_search.distill.task import StageTask
from indexcache_search.errors import JournalError
from indexcache_search.hf.device import checkpoint_gradients, resolve_attention
from indexcache_search.hf.loading import describe_model, load_model, read_config, set_quiet
from indexcache_search.training.processes import Processes, joined
from indexcache_search.training.sets import TrainingData
from indexcache_search.training.settings import Folders
from indexcache_search.training.work import Work
from sglang_indexcache import ModelLayers, Pattern
from sglang_indexcache.model.files import ModelFiles

STAGES: tuple[Stage, ...] = ("warmup", "sparse")


def run(
    model: str,
    data: TrainingData,
    settings: DistillSettings,
    runtime: TrainingRuntime,
    folders: Folders,
    console: Console,
) -> tuple[Mapping[str, Any], list[Path]]:
    """Train `model` for a pattern, write the results, and return the metrics and the files written.

    All processes of a launch call this; only the first writes and prints.

    Raises:
        IndexCacheError: if a request can't be fulfilled.
        NonFiniteLossError: if a loss is NaN or infinite; the last good checkpoint stays.
    """
    set_quiet()
    description, config = describe_model(model), read_config(model)
    check_model(model, description, config, data, settings, runtime)
    check_source(model)
    with ExitStack() as stack:
        processes = stack.enter_context(joined(runtime.device == "cpu", computes_in_bfloat16(runtime)))
        settings.check(processes.count)
        attention = resolve_attention(runtime.attention, processes.device)
        stages = [stage for stage in STAGES if len(range(*settings.range(stage)))]
        if runtime.check_memory:
            for stage in stages:
                check_memory(config, settings, stage, data, runtime, attention, processes)
        also = {"attention": attention, "processes": processes.count}
        run = stack.enter_context(
            session(model, description, data, settings, settings.steps, runtime, folders, console, processes, also)
        )
        done = run.done
        finished = done >= settings.steps and run.work.is_whole(folders.model, processes)
        for stage in [] if finished else stages:
            first, last = settings.range(stage)
            result = folders.model if stage == stages[-1] else folders.warmed_up
            if stage != stages[-1] and done >= last and run.work.is_whole(result, processes):
                continue
            if done > last:
                raise JournalError(f"{result}: is not whole, and was left behind; --restart trains anew")
            run.progress.begin(stage)
            source = str(folders.warmed_up) if first else model
            loaded, dtypes = _load(source, description, processes, None if first else run.files)
            if runtime.gradient_checkpointing and stage == "sparse":
                checkpoint_gradients(loaded)  # in the warm-up the frozen body keeps no activations anyway
            task = StageTask(
                processes,
                loaded if processes.bfloat16 else loaded.float(),
                settings,
                stage,
                run.train,
                run.held_out,
                "auto" if attention == "kernels" else None,
            )
            if not done:
                for record in task.evaluate_before(description.native):
                    run.loop.report(record)
            run.loop.train(task, done)
            # The checkpoint between the stages has the model's own pattern and all of its indexers.
            pattern = settings.pattern if stage == stages[-1] else description.native
            keep = stage != stages[-1] or _keeps_shared(runtime, description)
            run.check_unchanged()
            _export(task.model, dtypes, source, pattern, run.work, result, keep, processes)
            done = max(done, last)
            del loaded, task
            gc.collect()
            torch.cuda.empty_cache()
        run.check_unchanged()
        curves = {} if run.log is None else {"curves.svg": draw(run.log.records, settings.warmup_steps)}
        return run.write(description, settings, "distilled", curves), run.work.results.written


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


def _keeps_shared(runtime: TrainingRuntime, description: ModelLayers) -> bool:
    """Return true if the result has the indexers of S layers; transformers runs all of DeepSeek-V3.2's."""
    return runtime.keep_shared if runtime.keep_shared is not None else "DeepseekV32" in description.architecture


def _export(
    model: Any,
    dtypes: Mapping[str, torch.dtype],
    source: str,
    pattern: Pattern,
    work: Work,
    folder: Path,
    keep_shared: bool,
    processes: Processes,
) -> None:
    """Gather the weights of all processes, and write them in their original dtypes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    if processes.first:
        weights = {name: value.to(dtypes[name]) for name, value in weights.items()}
        with work.exported(folder) as unfinished:
            export(model, weights, source, pattern, unfinished, keep_shared)
    processes.wait()
