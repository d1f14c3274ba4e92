"""Steps of `scale`: commands, folders, rows and sizes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from indexcache_train.distill.settings import IndexerSize
from scripts.bench.search.scale_table import BASE, CONTROL, DENSE, OWN, SEARCHED, SHARE, UNIFORM, Row
from sglang_indexcache import Pattern
from sglang_indexcache.pattern_file.file import PatternFile

REHEARSED = 4  # layers
MOST, FEWEST = 300, 150  # steps of a training: a third of them warm-up
OVERHEAD, SEARCH, EVALUATION = 45.0, 120.0, 60.0  # seconds: of a training beside its steps, and of all rows
REHEARSAL = 150.0  # seconds


@dataclass(frozen=True)
class Step:
    """A command that leaves `result` behind, and can start once `needs` is there.

    `seconds` are an estimate. One in the `background` ends by itself once all others have.
    """

    name: str
    command: Sequence[str]
    result: Path
    seconds: float
    needs: Path | None = None
    background: bool = False


@dataclass(frozen=True)
class Sizes:
    """Of all trainings: steps of both stages, and the seeds."""

    warmup_steps: int
    steps: int
    seeds: Sequence[int]


@dataclass(frozen=True)
class Plan:
    """Folders and commands of the whole."""

    options: argparse.Namespace
    sizes: Sizes
    pace: tuple[float, float] = (1.0, 1.0)  # seconds of a warm-up and of a sparse step
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.options.output)

    @property
    def dense(self) -> Path:
        """The dense model."""
        return self.folder / "dense"

    @property
    def searched(self) -> Path:
        """Return the folder that `--search-first` writes."""
        return self.folder / "searched"

    @property
    def base(self) -> Path:
        """The model with indexers in all layers."""
        return self.searched / "all-layers"

    @property
    def search_result(self) -> Path:
        """The record of the search, which is there once it has ended."""
        return self.searched / "search" / "metrics.json"

    @property
    def size(self) -> IndexerSize:
        """Of the indexers."""
        options = self.options
        return IndexerSize(heads=options.index_heads, dim=options.index_dim, topk=options.index_topk)

    def dense_step(self) -> Step:
        """Train the dense model."""
        options = self.options
        launcher, gpus = [sys.executable, "-m"], options.dense_gpus or options.gpus
        if gpus > 1:
            launcher += ["torch.distributed.run", "--nproc-per-node", str(gpus), "-m"]
        command = [*launcher, "scripts.demo_model.train_dense_mla", "--corpus", str(options.corpus)]
        command += ["--output", str(self.dense), "--seconds", str(options.dense_seconds)]
        for name in ("layers", "hidden", "heads", "passes", "tasks", "text", "longest"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--batch-tokens", str(options.dense_tokens // gpus)]
        return Step(
            DENSE, [*command, *options.dense.split()], self.dense / "model.safetensors", options.dense_seconds + 60
        )

    def dsa_step(self) -> Step:
        """Train the model with indexers in all layers alone, which a later `--search-first` takes as it is."""
        words = ["--pattern", "uniform@1", *self._indexers()]
        command = self._distill(self.dense, words, self.base, self.sizes.seeds[0])
        return Step(BASE, command, self.base / "metrics.json", self._once())

    def _once(self) -> float:
        """Return the seconds that one training takes."""
        return OVERHEAD + self.sizes.warmup_steps * self.pace[0] + self.sizes.steps * self.pace[1]

    def _indexers(self) -> list[str]:
        return [f"--index-{key}={value}" for key, value in vars(self.size).items()]

    def training_steps(self) -> list[Step]:
        """Train all that starts from the dense model, or from the one with indexers in all layers."""
        once = self._once()
        words = ["--search-first", SHARE, *self._indexers()]
        first = self._distill(self.dense, words, self.searched, self.sizes.seeds[0])
        steps = [Step("searched", first, self.searched / "trained" / "metrics.json", 2 * once + SEARCH)]
        for row in self.trained_rows():
            if row.model.parent == self.searched / "trained":
                continue
            after = self.base / "metrics.json" if row.pattern != "searched" else self.search_result
            words = ["--pattern", self._spec(row), *(["--loss", "own"] if row.name == OWN else [])]
            command = self._distill(self.base / "model", words, row.model.parent, row.seed or 0)
            steps.append(Step(row.model.parent.name, command, row.model.parent / "metrics.json", once, after))
        return steps

    def evaluation_step(self) -> Step:
        """Evaluate rows as they come."""
        given = {**vars(self.options), "only": "evaluate", "wait": None, "export_pieces": None}
        words = [f"--{key.replace('_', '-')}={as_word(value)}" for key, value in given.items() if value is not None]
        command = [sys.executable, "-m", "scripts.bench.search.scale", "--wait", *words]
        return Step(
            "evaluation", command, self.folder / "never", EVALUATION, self.base / "metrics.json", background=True
        )

    def trained_rows(self) -> list[Row]:
        """Rows that train, by seed."""
        found = []
        for seed in self.sizes.seeds:
            trained = self.searched / "trained" if seed == self.sizes.seeds[0] else self.folder / f"searched-{seed}"
            for name, pattern, folder in (
                (CONTROL, "uniform@1", self.folder / f"control-{seed}"),
                (UNIFORM, f"uniform@{SHARE}", self.folder / f"uniform-{seed}"),
                (OWN, f"uniform@{SHARE}", self.folder / f"own-{seed}"),
                (SEARCHED, "searched", trained),
            ):
                found.append(Row(name, folder / "model", pattern, CONTROL, seed))
        return found

    def rows(self) -> list[Row]:
        """All rows; those that did not train first."""
        model = self.base / "model"
        return [
            Row(DENSE, self.folder / "dense-as-dsa", "uniform@1", BASE),
            Row(BASE, model, "uniform@1", BASE),
            Row(f"uniform {SHARE}, training-free", model, f"uniform@{SHARE}", BASE),
            Row(f"searched {SHARE}, training-free", model, "searched", BASE),
            Row(f"similarity {SHARE}, training-free", model, "similarity", BASE),
            *self.trained_rows(),
        ]

    def is_ready(self, row: Row) -> bool:
        """Return whether a row can be evaluated."""
        if row.pattern in ("searched", "similarity") and not self.search_result.exists():
            return False
        return (self.base / "metrics.json").exists() and (row.name == DENSE or (row.model / "config.json").exists())

    def pattern(self, row: Row, layers: int) -> Pattern:
        """Return the pattern that a row runs with."""
        if row.pattern == "searched":
            return PatternFile.load(self._spec(row)).as_pattern()
        if row.pattern == "similarity":
            result = json.loads(self.search_result.read_text())
            [found] = [item["pattern"] for item in result["held_out"]["rows"] if item["name"] == "similarity"]
            return Pattern(found)
        return Pattern.uniform(layers, int(row.pattern.rpartition("/")[2]) if "/" in row.pattern else 1)

    def _spec(self, row: Row) -> str:
        file = self.searched / "search" / "pattern.yaml"
        return f"{file}@{SHARE}" if row.pattern == "searched" else row.pattern

    def _distill(self, model: Path, words: Sequence[str], output: Path, seed: int) -> list[str]:
        options, sizes = self.options, self.sizes
        named = {
            "--training": self.folder / "training.jsonl",
            "--evaluation": self.folder / "held-out.jsonl",
            "--seq-len": options.length,
            "--num-sequences": options.batch_size * (sizes.warmup_steps + sizes.steps),
            "--num-eval-sequences": options.held_out,
            "--seed": seed,
            "--warmup": f"steps={sizes.warmup_steps},lr=1e-3",
            "--sparse": f"steps={sizes.steps},lr={options.lr},indexer_lr={options.indexer_lr}",
            "--optimizer": "ramp_steps=10",
            "--batch-size": options.batch_size,
            "--engine": f"micro_batch={options.micro_batch},gradient_checkpointing=no",
            "--every": "evaluate=100000,checkpoint=100,show=10",
            "--output": output,
        }
        flags = [str(part) for pair in named.items() for part in pair]
        return [sys.executable, "-m", "indexcache_train", "--model", str(model), *words, *flags]


def outline(plan: Plan, parts: Sequence[str]) -> str:
    """Say how long each part takes, in the order in which they begin, and all of them on these GPUs."""
    options = plan.options
    times = [("rehearsal", REHEARSAL)] if "rehearse" in parts else []
    times += [(DENSE, plan.dense_step().seconds)] if "dense" in parts else []
    total = sum(seconds for _, seconds in times)
    if "dsa" in parts:
        times.append((BASE, plan.dsa_step().seconds))
        total += times[-1][1]
    if "train" in parts:
        steps = plan.training_steps()
        times += [(step.name, step.seconds) for step in steps] + [("evaluation", EVALUATION)]
        first, others = steps[0].seconds, sum(step.seconds for step in steps[1:])
        total += max(first, (first + others) / (options.gpus * options.at_once)) + EVALUATION
    lines = [f"{name}: about {seconds:.0f} s" for name, seconds in times]
    return "\n".join([*lines, f"all: about {total:.0f} s on {options.gpus} GPUs, {options.at_once} at once on each"])


def as_word(value: Any) -> str:
    """Write an option as the command line reads it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def pace(log: Path) -> tuple[float, float] | None:
    """Return the seconds of a warm-up and of a sparse step of a training, or None before it has taken both.

    The first step of a stage, in which kernels are compiled, does not count.
    """
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    steps = [item for item in records if "seconds" in item]  # others are evaluations
    taken = [[item["seconds"] for item in steps if item["stage"] == name][1:] for name in ("warmup", "sparse")]
    return (median(taken[0]), median(taken[1])) if all(taken) else None


def sizes_for(left: float, pace: tuple[float, float], seeds: Sequence[int], gpus: int, at_once: int) -> Sizes:
    """Return the steps and seeds that fit into `left` seconds: as many seeds as train for `FEWEST` steps or more.

    Trainings side by side on one GPU share its time, but for what each does beside its steps. The search runs beside
    trainings. Where not even one seed fits, it trains for `FEWEST` steps.
    """
    for count in range(len(seeds), 0, -1):
        for steps in range(MOST, FEWEST - 1, -3):
            warmup = steps // 3
            work = warmup * pace[0] + (steps - warmup) * pace[1]
            trainings = SEARCH + 4 * count * (OVERHEAD / at_once + work)
            if OVERHEAD + work + max(trainings / gpus, SEARCH + OVERHEAD + work) + EVALUATION <= left:
                return Sizes(warmup, steps - warmup, seeds[:count])
    return Sizes(FEWEST // 3, FEWEST - FEWEST // 3, seeds[:1])
