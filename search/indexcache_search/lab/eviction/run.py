"""A whole training of eviction heads: from a dense model and data to a checkpoint that has them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from indexcache_search import estimates
from indexcache_search.data.tokens import TokenSet
from indexcache_search.distill.export import check_source, copy_files, local_folder
from indexcache_search.distill.preflight import computes_in_bfloat16
from indexcache_search.distill.progress import TrainingProgress
from indexcache_search.distill.result import as_evaluation
from indexcache_search.distill.settings import Runtime
from indexcache_search.errors import SearchError
from indexcache_search.hf.device import checkpoint_gradients, memory_error_in_one_line
from indexcache_search.hf.loading import (
    check_seq_len,
    describe_model,
    load_model,
    model_folder,
    read_config,
    set_quiet,
)
from indexcache_search.identity import today
from indexcache_search.lab.eviction.heads import FILE, EvictionHeads, attach, heads_of
from indexcache_search.lab.eviction.settings import EvictionSettings
from indexcache_search.lab.eviction.task import EvictionTask
from indexcache_search.progress import warn
from indexcache_search.training.checkpoints import Checkpoints
from indexcache_search.training.loop import Loop
from indexcache_search.training.processes import Processes, joined
from indexcache_search.training.sets import Data, training_sets
from indexcache_search.training.settings import Folders
from indexcache_search.training.work import Work, check_folders, work_folder
from sglang_indexcache import ModelLayers, Pattern, PatternFile, __version__
from sglang_indexcache.families import describe
from sglang_indexcache.model_files import ModelFiles, tokenizer_files, weight_files
from sglang_indexcache.naming import naming
from sglang_indexcache.pattern_file import ModelSection
from sglang_indexcache.steps import NO_MEMORY


def run(
    model: str, data: Data, settings: EvictionSettings, runtime: Runtime, folders: Folders, console: Console
) -> tuple[Mapping[str, Any], list[Path]]:
    """Train eviction heads of `model`, write model/, pattern.yaml, log.jsonl and metrics.json; metrics and what was
    written.

    Raises:
        IndexCacheError: if something asked for can't be done.
        NonFiniteLossError: if a loss is NaN or infinite; the last good checkpoint stays.
    """
    set_quiet()
    check_source(model)
    description, config = describe_model(model, settings.pattern.selection), read_config(model)
    if runtime.attention == "kernels":
        raise SearchError("--attention kernels does not train eviction heads, expected auto or naive")
    if config.attention_dropout:
        raise SearchError(f"{model}: attention_dropout is {config.attention_dropout}, expected 0")
    settings.pattern.check_fits(description.num_layers)
    check_seq_len(data.seq_len, config)
    with joined(runtime.device == "cpu", computes_in_bfloat16(runtime)) as processes:
        settings.check(processes.count)
        return _run(model, description, data, settings, runtime, folders, console, processes)


def _run(
    model: str,
    description: ModelLayers,
    data: Data,
    settings: EvictionSettings,
    runtime: Runtime,
    folders: Folders,
    console: Console,
    processes: Processes,
) -> tuple[Mapping[str, Any], list[Path]]:
    if processes.first:
        check_folders(folders, data.reads(model))
    files, tokenizer = (ModelFiles.read(model_folder(model), listed) for listed in (weight_files, tokenizer_files))
    identity = {
        "model": description.name,
        "config_sha256": description.config_sha256,
        "weights_sha256": files.sha256,
        "tokenizer_sha256": tokenizer.sha256,
        **settings.as_dict(),
        "dtype": "bfloat16" if processes.bfloat16 else "float32",
    }
    with work_folder(folders, data, identity, processes) as work:
        train, held_out = training_sets(
            model, description, data, work.identity, settings.seed, folders, processes, partial(warn, console)
        )
        checkpoints = Checkpoints(folders.work / "checkpoints", processes)
        done = checkpoints.latest()
        with (
            work.log(done, runtime.tensorboard) as log,
            TrainingProgress(console, done, settings.steps) as progress,
            checkpoints.named(),
            memory_error_in_one_line(
                f"--seq-len {data.seq_len} and --micro-batch-size {settings.micro_batch_size}",
                "--gradient-checkpointing, shorter sequences or a smaller micro batch",
            ),
        ):
            progress.begin("eviction")
            if done < settings.steps or not work.is_whole(folders.model, processes):
                loaded = _load(model, description, settings, runtime, processes, files)
                task = EvictionTask(processes, loaded, settings, train, held_out)
                loop = Loop(processes, checkpoints, log, progress.watch, runtime.intervals)
                if not done:
                    for name, pattern in _others(settings.pattern, description.native).items():
                        loop.report({"step": 0, "stage": name, **task.evaluate(pattern)})
                loop.train(task, done)
                files.check()
                tokenizer.check()
                with work.exported(folders.model) as unfinished:
                    _export(task.model, model, settings, unfinished)
        files.check()
        tokenizer.check()
        return _results(log.records, held_out, description, settings, work), work.results.written


def _others(pattern: Pattern, native: Pattern) -> dict[str, Pattern]:
    """What the heads are compared with, of the same size: attention to everything, and plans without training."""
    selection, steps = pattern.selection, pattern.selection.steps if pattern.selection else NO_MEMORY
    assert selection is not None
    return {
        "original": native,
        "best by query": replace(pattern, selection=replace(selection, steps=NO_MEMORY)),
        "norms of values": replace(pattern, selection=replace(selection, steps=replace(steps, importance=None))),
    }


def _load(
    model: str,
    description: ModelLayers,
    settings: EvictionSettings,
    runtime: Runtime,
    processes: Processes,
    files: ModelFiles,
) -> Any:
    """The model with new heads, on its device; float32 where that is computed in.

    Raises:
        ModelConfigError: if it is not what `files` were.
    """
    loaded, found = load_model(model, description, "auto")
    files.check_loaded(found)
    loaded = loaded.to(processes.device)
    if not processes.bfloat16:
        loaded = loaded.float()
    if processes.device.type == "cpu":
        loaded.set_attn_implementation("eager")
    attach(loaded, EvictionHeads.like(loaded.config, settings.use, settings.seed))
    if runtime.gradient_checkpointing:
        checkpoint_gradients(loaded)
    return loaded


def _export(model: Any, source: str, settings: EvictionSettings, folder: Path) -> None:
    """Fill `folder` with the checkpoint that the model came from, with its heads, and if it trained its weights."""
    origin = local_folder(source)
    copy_files(origin, folder, weights=not settings.body)
    if settings.body:
        kept = {name: item for name, item in model.state_dict().items() if not name.startswith("eviction_heads.")}
        dtype = getattr(torch, str(model.config.dtype).removeprefix("torch."))
        with naming(folder):
            model.save_pretrained(folder, state_dict={name: item.to(dtype) for name, item in kept.items()})
        shutil.copyfile(origin / "config.json", folder / "config.json")
    heads_of(model).save(folder / FILE)


def _results(
    records: list[dict[str, Any]],
    held_out: TokenSet,
    description: ModelLayers,
    settings: EvictionSettings,
    work: Work,
) -> dict[str, Any]:
    """Write metrics.json and pattern.yaml; the held-out losses, paired, of what the heads are compared with."""
    evaluations = [record for record in records if "losses" in record]
    original = as_evaluation(evaluations[0]["losses"], evaluations[0]["tokens"], description.native)
    rows = []
    for record in evaluations:
        loss, divergence = (
            as_evaluation(record[name], record["tokens"], settings.pattern) for name in ("losses", "divergences")
        )
        rise, kl = estimates.increase(loss, original, held_out), estimates.loss(divergence, held_out)
        rows.append(
            {
                "step": record["step"],
                "plan": record["stage"],
                "loss": estimates.loss(loss, held_out).mean,
                "increase": rise.mean,
                "increase_stderr": rise.stderr,
                "kl": kl.mean,
                "kl_stderr": kl.stderr,
            }
        )
    versions = {
        "sglang_indexcache": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }
    metrics = {
        "model": description.name,
        "settings": settings.as_dict(),
        "held_out": {"sha256": held_out.sha256, "sequences": held_out.num_sequences, "sources": held_out.sources},
        "rows": rows,
        "seconds": sum(record.get("seconds", 0.0) for record in records),
        "versions": versions,
    }
    model = describe(json.loads((work.folders.model / "config.json").read_text()), f"{description.name}-eviction")
    pattern = settings.pattern
    file = PatternFile(
        schema="indexcache/v1",
        model=ModelSection.of(model),
        selection=pattern.selection,
        pattern=pattern.roles,
        retention=pattern.retention,
        versions=versions,
        created=today()["created"],
    )
    work.write({"metrics.json": json.dumps(metrics, indent=1) + "\n", "pattern.yaml": file.dumps()})
    return metrics


def terminal_table(metrics: Mapping[str, Any]) -> Table:
    """Held-out losses for a terminal."""
    table = Table(title=f"{metrics['model']}: {metrics['settings']['pattern']}")
    for column in ("", "loss", "more than attending to everything", "KL"):
        table.add_column(column, justify="left" if not column else "right")
    for row in metrics["rows"]:
        name = row["plan"] if row["plan"] != "eviction" else f"heads, step {row['step']}"
        errors = ["" if row[key] is None else f" ±{row[key]:.4f}" for key in ("increase_stderr", "kl_stderr")]
        table.add_row(name, f"{row['loss']:.4f}", f"{row['increase']:+.4f}{errors[0]}", f"{row['kl']:.4f}{errors[1]}")
    return table
