"""Search a pattern, then train the model for it: one command for what are two or three runs.

A dense model first gets indexers in all layers, and trains with them: a search needs indexers that know something. Each
run has a folder of its own and resumes there, so the whole resumes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console

from indexcache_search.data.packing import Wish
from indexcache_search.engines.settings import RunSettings
from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import describe_model, read_config, set_quiet
from indexcache_search.searching.job import Files, SearchData, SearchJob
from indexcache_search.searching.run import run as search
from indexcache_search.searching.settings import Settings
from indexcache_train.distill import run as training
from indexcache_train.distill.dense_mla import DenseStart
from indexcache_train.distill.settings import DistillSettings, TrainingRuntime
from indexcache_train.training.folders import check_folders
from indexcache_train.training.processes import joined
from indexcache_train.training.sets import TrainingData
from indexcache_train.training.settings import Folders
from sglang_indexcache.command_line import error_context
from sglang_indexcache.pattern import Pattern

ALL_LAYERS, SEARCH, TRAINED = "all-layers", "search", "trained"  # folders in the output folder
_SEQUENCES = Wish(32)  # of a search
_ONE_BY_ONE = (
    "indexcache-distill --pattern uniform@1, indexcache-search on its model, and indexcache-distill with the pattern,"
    " one after the other"
)


def run(
    model: str,
    data: TrainingData,
    settings: DistillSettings,
    retention: Fraction,
    runtime: TrainingRuntime,
    *,
    folders: Folders,
    console: Console,
    start: DenseStart | None = None,
) -> tuple[Mapping[str, Any], list[Path]]:
    """Search the pattern of `retention` that loses least, and train for it; see `indexcache_train.distill.run.run`.

    `settings` hold for each of the trainings; their pattern is not read. The search reads the training data, on
    transformers, in this process.

    Raises:
        IndexCacheError: if a request can't be fulfilled; as far as that is known, before anything is written.
        NonFiniteLossError: if a loss is NaN or infinite; the last good checkpoint stays.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise SearchError(f"--search-first searches in one process, found {count}; expected {_ONE_BY_ONE}")
    if data.apart:
        raise SearchError(
            "--rows documents=apart with --search-first, whose search knows joined documents alone; expected"
            f" {_ONE_BY_ONE}"
        )
    set_quiet()
    description = describe_model(model) if start is None else start.description
    goal = Settings(retain=(retention,))
    goal.goal(description)
    last = replace(folders, output=folders.output / TRAINED)
    check_folders(last, data.reads(model))
    base = model
    with joined(runtime.device, runtime.dtype) as processes:
        dtype = "bfloat16" if processes.bfloat16 else "float32"
        if runtime.check_memory and start is None:  # of the largest of these runs
            native = replace(settings, pattern=description.native)
            training.check_memory(read_config(model), native, data, runtime, processes)
    if start is not None:
        every = replace(settings, pattern=Pattern.full(description.num_layers))
        first = replace(folders, output=folders.output / ALL_LAYERS)
        with error_context("training with indexers in all layers"):
            training.run(model, data, every, runtime, first, console=console, start=start)
        base = str(first.model)
    with error_context("searching a pattern"):
        job = SearchJob(
            model=base,
            data=SearchData(
                calibration=data.training,
                evaluation=data.evaluation,
                seq_len=data.seq_len,
                num_sequences=min(_SEQUENCES, data.num_sequences),
                num_eval_sequences=data.num_eval_sequences,
                seed=settings.seed,
                rows=data.rows,
            ),
            run=RunSettings(
                device=runtime.device,
                dtype=dtype,
                batch_size=settings.micro_batch_size,
                own={"attention": runtime.attention},
            ),
            settings=goal,
            files=Files(
                folder=folders.output / SEARCH,
                work_dir=folders.output / SEARCH / "work",
                restart=folders.restart,
            ),
            console=console,
        )
        found = search(job)
    pattern = found.pattern_file.as_pattern()
    with error_context("training with the pattern found"):
        return training.run(base, data, replace(settings, pattern=pattern), runtime, last, console=console)
