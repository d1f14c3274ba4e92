"""A whole training of eviction heads: from a dense model and data to a checkpoint that has them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from indexcache_dense.reuse import NO_MEMORY
from indexcache_dense.selection import selection_in
from indexcache_lab.eviction.heads import FILE, EvictionHeads, attach
from indexcache_lab.eviction.task import STAGE, EvictionSettings, EvictionTask
from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import check_seq_len, describe_model, load_model, read_config, set_quiet
from indexcache_train.distill.export import check_source, copy_files
from indexcache_train.distill.session import session
from indexcache_train.distill.settings import TrainingRuntime
from indexcache_train.training.processes import Processes, joined
from indexcache_train.training.recompute import checkpoint_gradients
from indexcache_train.training.sets import TrainingData
from indexcache_train.training.settings import Folders
from sglang_indexcache import Pattern
from sglang_indexcache.io.naming import naming


def run(
    model: str,
    data: TrainingData,
    settings: EvictionSettings,
    runtime: TrainingRuntime,
    folders: Folders,
    *,
    console: Console,
) -> tuple[Mapping[str, Any], list[Path]]:
    """Train eviction heads of `model`, write the results, and return the metrics and the files written.

    Raises:
        IndexCacheError: if a request can't be fulfilled.
        NonFiniteLossError: if a loss is NaN or infinite; the last good checkpoint stays.
    """
    set_quiet()
    check_source(model)
    description, config = describe_model(model, settings.pattern.selection), read_config(model)
    if config.attention_dropout:
        raise SearchError(f"{model}: attention_dropout is {config.attention_dropout}, expected 0")
    settings.pattern.check_fits(description.num_layers)
    check_seq_len(data.seq_len, config)
    names = {STAGE: "eviction heads"}
    with ExitStack() as stack:
        processes = stack.enter_context(joined(runtime.device, runtime.dtype))
        settings.check(processes.count)
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
                also={},
                names=names,
            )
        )
        run.progress.begin(STAGE)
        if run.done < settings.steps or not run.folders.is_whole(folders.model, processes):
            loaded, found = load_model(model, description, "auto")
            run.files.check_loaded(found)
            prepared = _prepared(loaded, settings, runtime, processes)
            task = EvictionTask(processes, prepared, settings, run.train, run.held_out)
            if not run.done:
                for name, pattern in _others(settings.pattern, description.native).items():
                    run.loop.report({"step": 0, "stage": name, **task.evaluate(pattern)})
            run.loop.train(task, run.done)
            run.check_unchanged()
            with run.folders.exported(folders.model) as unfinished:
                _export(task.model, run.files.folder, settings, unfinished)
        run.check_unchanged()
        return run.write(description, settings, "eviction", {}), run.folders.results.written


def _others(pattern: Pattern, native: Pattern) -> dict[str, Pattern]:
    """List patterns to compare with, of the same size: attention to everything, and plans without training."""
    selection = selection_in(pattern)
    assert selection is not None
    by_query = replace(selection, steps=NO_MEMORY)
    by_norms = replace(selection, steps=replace(selection.steps, importance=None))
    plans = {"best by query": by_query, "norms of values": by_norms}
    return {"original": native, **{name: replace(pattern, selection=plan) for name, plan in plans.items()}}


def _prepared(loaded: Any, settings: EvictionSettings, runtime: TrainingRuntime, processes: Processes) -> Any:
    """Return a model with new heads on its device, in float32 where that is computed in."""
    loaded = loaded.to(processes.device)
    if not processes.bfloat16:
        loaded = loaded.float()
    if processes.device.type == "cpu":
        loaded.set_attn_implementation("eager")
    attach(loaded, EvictionHeads.like(loaded.config, settings.use, settings.seed, detach=settings.detach))
    if runtime.gradient_checkpointing:
        checkpoint_gradients(loaded)
    return loaded


def _export(model: Any, origin: Path, settings: EvictionSettings, folder: Path) -> None:
    """Fill `folder` with the original checkpoint and the heads; a trained body replaces the original weights."""
    if settings.body:
        dtype = getattr(torch, str(model.config.dtype).removeprefix("torch."))
        body = {k: item.to(dtype) for k, item in model.state_dict().items() if not k.startswith("importance.")}
        with naming(folder):
            model.save_pretrained(folder, state_dict=body)
    copy_files(origin, folder, weights=not settings.body)
    model.importance.save(folder / FILE)


def terminal_table(metrics: Mapping[str, Any]) -> Table:
    """Make the table of held-out losses for a terminal."""
    table = Table(title=f"{metrics['model']}: {metrics['settings']['pattern']}")
    for column in ("", "loss", "more than attending to everything", "KL"):
        table.add_column(column, justify="left" if not column else "right")
    for row in metrics["rows"]:
        name = row["stage"] if row["stage"] != STAGE else f"heads, step {row['step']}"
        errors = ["" if row[key] is None else f" ±{row[key]:.4f}" for key in ("increase_stderr", "kl_stderr")]
        table.add_row(name, f"{row['loss']:.4f}", f"{row['increase']:+.4f}{errors[0]}", f"{row['kl']:.4f}{errors[1]}")
    return table
