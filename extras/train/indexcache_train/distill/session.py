"""The common part of runs that train a checkpoint: its files, folders, data, log and progress."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rich.console import Console

import sglang_indexcache
from indexcache_search.console import bar
from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation.identity import today
from indexcache_search.hf.device import memory_error_in_one_line
from indexcache_search.hf.loading import model_folder
from indexcache_train.distill.result import collect
from indexcache_train.distill.settings import TrainingRuntime, TrainingSettings
from indexcache_train.distill.tokenizer_files import tokenizer_files
from indexcache_train.training.checkpoints import Checkpoints
from indexcache_train.training.folders import HeldFolders, check_folders, held_folders
from indexcache_train.training.log import TrainingLog
from indexcache_train.training.loop import Loop
from indexcache_train.training.processes import Processes
from indexcache_train.training.progress import TrainingProgress
from indexcache_train.training.sets import TrainingData, training_sets
from indexcache_train.training.settings import Folders
from sglang_indexcache import ModelLayers
from sglang_indexcache.families import describe
from sglang_indexcache.model.files import ModelFiles, weight_files
from sglang_indexcache.pattern_file.file import ModelSection, PatternFile


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run while it holds its folders.

    Attributes:
        folders: folders of the run.
        train: training sequences.
        held_out: evaluation sequences.
        done: steps done by an earlier run.
        log: the records, in the first process.
        loop: runs tasks.
        progress: for messages.
        files: the checkpoint's files when the run began.
        tokenizer: the tokenizer's files when the run began.
    """

    folders: HeldFolders
    train: TokenSet
    held_out: TokenSet
    done: int
    log: TrainingLog | None
    loop: Loop
    progress: TrainingProgress
    files: ModelFiles
    tokenizer: ModelFiles

    def check_unchanged(self) -> None:
        """Check that the original model is unchanged, before results that name it are written.

        Raises:
            ModelConfigError: naming the change.
        """
        if self.log is not None:
            self.files.check()
            self.tokenizer.check()

    def write(
        self, description: ModelLayers, settings: TrainingSettings, suffix: str, more: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Write metrics.json, pattern.yaml and `more` in the first process, and return the metrics.

        The pattern file names the model after `description` and `suffix`.
        """
        if self.log is None:
            return {}
        versions = {
            "sglang_indexcache": sglang_indexcache.__version__,
            **{name: version(name) for name in ("torch", "transformers")},
        }
        metrics = collect(self.log.records, self.held_out, description, settings, versions)
        config = json.loads((self.folders.paths.model / "config.json").read_text())
        file = PatternFile(
            schema="indexcache/v1",
            model=ModelSection.of(describe(config, f"{description.name}-{suffix}")),
            selection=settings.pattern.selection,
            pattern=settings.pattern.roles,
            retention=settings.pattern.retention,
            versions=versions,
            created=today()["created"],
        )
        self.folders.write({"metrics.json": json.dumps(metrics, indent=1) + "\n", **more, "pattern.yaml": file.dumps()})
        return metrics


@contextmanager
def session(
    model: str,
    description: ModelLayers,
    data: TrainingData,
    settings: TrainingSettings,
    steps: int,
    *,
    runtime: TrainingRuntime,
    paths: Folders,
    console: Console,
    processes: Processes,
    also: Mapping[str, Any],
    names: Mapping[Any, str],
) -> Iterator[Session]:
    """Begin or resume a run in all of its processes; only the first writes and prints.

    `steps` are those of all stages, `also` names other inputs of the trained weights, `names` are displayed names of
    the stages.

    Raises:
        IndexCacheError: if folders or data can't be used, or belong to another run.
    """
    if processes.first:
        check_folders(paths, data.reads(model))
    files, tokenizer = (ModelFiles.read(model_folder(model), listed) for listed in (weight_files, tokenizer_files))
    identity = {
        "model": description.name,
        "config_sha256": description.config_sha256,
        "weights_sha256": files.sha256,
        "tokenizer_sha256": tokenizer.sha256,
        **settings.as_dict(),
        "dtype": "bfloat16" if processes.bfloat16 else "float32",
        **also,
    }
    with held_folders(paths, data, identity, processes) as folders:
        train, held_out = training_sets(
            model,
            description,
            data,
            folders.identity,
            settings.seed,
            folders=paths,
            processes=processes,
            console=console,
        )
        checkpoints = Checkpoints(paths.work / "checkpoints", processes)
        done = checkpoints.latest()
        with (
            closing(folders.log(done, runtime.tensorboard)) if processes.first else nullcontext() as log,
            bar(console if processes.first else Console(quiet=True)) as shown,
            checkpoints.named(),
            memory_error_in_one_line(
                f"--seq-len {data.seq_len} and --engine micro_batch={settings.micro_batch_size}",
                "gradient_checkpointing=yes, or a run with more processes, shorter sequences or a smaller micro batch",
            ),
        ):
            progress = TrainingProgress(shown, done, steps, names)
            yield Session(
                folders=folders,
                train=train,
                held_out=held_out,
                done=done,
                log=log,
                loop=Loop(processes, checkpoints, log, progress, runtime.intervals),
                progress=progress,
                files=files,
                tokenizer=tokenizer,
            )
