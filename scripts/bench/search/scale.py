"""Training-aware IndexCache on a dense language model of 62 million weights, from the first step to the table.

    python -m scripts.demo_model.corpus --output build/corpus8192 --vocab-size 8192
    python -m scripts.bench.search.scale --corpus build/corpus8192 --output build/scale

A dense model with latent attention is trained (`scripts.demo_model.train_dense_mla`) and made DSA by
`indexcache-distill --search-first 1/4`: indexers in all layers, a search, training with the pattern found. From the
model with indexers in all layers, uniform 1/4 trains with the loss over all layers and with its own layer's alone, and
the model trains on without a pattern, so that what more training does is not taken for what the loss does. All rows are
evaluated on held-out text and on samples of `indexcache-eval --tasks`.

Each step is a command of its own, which is printed. The same command again goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from indexcache_search.compare.held_out import ComparisonSet, build
from indexcache_search.data.reader import TokenReader
from indexcache_search.distill.conversion import convert
from indexcache_search.distill.dense_mla import DenseStart
from indexcache_search.distill.settings import IndexerSize
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.hf.loading import describe_model, load_tokenizer, set_quiet
from scripts.demo_model.mixture import TASK_NAMES, Batches, scored
from sglang_indexcache import Pattern
from sglang_indexcache.files.pattern_file import PatternFile

SHARE = "1/4"
GROUPS = {"text": ("text",), "RULER-like": tuple(name for name in TASK_NAMES if name != "mrcr"), "MRCR-like": ("mrcr",)}
HELD_OUT = 16  # sequences of indexcache-distill's own held-out set
DENSE, BASE = "dense", "DSA"


@dataclass(frozen=True)
class Step:
    """A command that leaves `result` behind, and can start once `needs` is there; `seconds` are an estimate."""

    name: str
    command: Sequence[str]
    result: Path
    seconds: float
    needs: Path | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table: the checkpoint that runs with `pattern`, and the row that it is compared with."""

    name: str
    model: Path
    pattern: Pattern | Path | str
    reference: str
    seed: int | None = None


@dataclass(frozen=True)
class Plan:
    """Folders and commands of the whole."""

    options: argparse.Namespace
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.options.output)

    @property
    def dense(self) -> Path:
        """The dense model."""
        return self.folder / "dense"

    @property
    def searched(self) -> Path:
        """What `--search-first` leaves."""
        return self.folder / "searched"

    @property
    def base(self) -> Path:
        """The model with indexers in all layers."""
        return self.searched / "all-layers"

    def dense_step(self) -> Step:
        """Train the dense model."""
        options = self.options
        launcher = [sys.executable, "-m"]
        if options.gpus > 1:
            launcher += ["torch.distributed.run", "--nproc-per-node", str(options.gpus), "-m"]
        command = [*launcher, "scripts.demo_model.train_dense_mla", "--corpus", str(options.corpus)]
        command += ["--output", str(self.dense), "--seconds", str(options.dense_seconds), *options.dense.split()]
        return Step("dense", command, self.dense / "model.safetensors", options.dense_seconds + 60)

    def training_steps(self) -> list[Step]:
        """Train all that starts from the dense model, or from the one with indexers in all layers."""
        options = self.options
        once = options.warmup_steps * options.warmup_pace + options.steps * options.sparse_pace + 30
        size = [f"--index-{key}={value}" for key, value in vars(self.size).items()]
        first = self._distill(self.dense, ["--search-first", SHARE, *size], self.searched, options.seeds[0])
        steps = [Step("searched", first, self.searched / "trained" / "metrics.json", 2 * once + options.search_seconds)]
        ready = self.base / "metrics.json"
        for row in self.trained_rows():
            if row.model.parent == self.searched / "trained":
                continue
            after = ready if row.pattern != "searched" else self.searched / "search" / "pattern.yaml"
            words = ["--pattern", self._spec(row), *(["--loss", "own"] if "own" in row.name else [])]
            command = self._distill(self.base / "model", words, row.model.parent, row.seed or 0)
            steps.append(Step(row.model.parent.name, command, row.model.parent / "metrics.json", once, after))
        return steps

    @property
    def size(self) -> IndexerSize:
        """Of the indexers."""
        options = self.options
        return IndexerSize(heads=options.index_heads, dim=options.index_dim, topk=options.index_topk)

    def trained_rows(self) -> list[Row]:
        """Rows that train, by seed."""
        found = []
        for seed in self.options.seeds:
            trained = self.searched / "trained" if seed == self.options.seeds[0] else self.folder / f"searched-{seed}"
            control = f"{BASE}, trained as long"
            for name, pattern, folder in (
                (control, "uniform@1", self.folder / f"control-{seed}"),
                (f"uniform {SHARE}, trained", f"uniform@{SHARE}", self.folder / f"uniform-{seed}"),
                (f"uniform {SHARE}, trained, own layer's loss", f"uniform@{SHARE}", self.folder / f"own-{seed}"),
                (f"searched {SHARE}, trained", "searched", trained),
            ):
                found.append(Row(name, folder / "model", pattern, control, seed))
        return found

    def rows(self, layers: int) -> list[Row]:
        """All rows; those that did not train first."""
        model = self.base / "model"
        result = json.loads((self.searched / "search" / "metrics.json").read_text())
        [similar] = [row["pattern"] for row in result["held_out"]["rows"] if row["name"] == "similarity"]
        return [
            Row(DENSE, self.folder / "dense-as-dsa", Pattern.full(layers), BASE),
            Row(BASE, model, Pattern.full(layers), BASE),
            Row(f"uniform {SHARE}, training-free", model, Pattern.uniform(layers, 4), BASE),
            Row(f"searched {SHARE}, training-free", model, "searched", BASE),
            Row(f"similarity {SHARE}, training-free", model, Pattern(similar), BASE),
            *self.trained_rows(),
        ]

    def pattern(self, row: Row, layers: int) -> Pattern:
        """Return the pattern that a row runs with."""
        if isinstance(row.pattern, Pattern):
            return row.pattern
        if row.pattern == "searched":
            return PatternFile.load(self._spec(row)).as_pattern()
        return Pattern.uniform(layers, int(str(row.pattern).rpartition("/")[2]) if "/" in str(row.pattern) else 1)

    def _spec(self, row: Row) -> str:
        file = self.searched / "search" / "pattern.yaml"
        return f"{file}@{SHARE}" if row.pattern == "searched" else str(row.pattern)

    def _distill(self, model: Path, words: Sequence[str], output: Path, seed: int) -> list[str]:
        options = self.options
        named = {
            "--training": self.folder / "training.jsonl",
            "--evaluation": self.folder / "held-out.jsonl",
            "--seq-len": options.length,
            "--num-sequences": options.batch_size * (options.warmup_steps + options.steps),
            "--num-eval-sequences": HELD_OUT,
            "--seed": seed,
            "--warmup": f"steps={options.warmup_steps},lr=1e-3",
            "--sparse": f"steps={options.steps},lr={options.lr},indexer_lr={options.indexer_lr}",
            "--optimizer": "ramp_steps=10",
            "--batch-size": options.batch_size,
            "--engine": f"micro_batch={options.micro_batch},gradient_checkpointing=no",
            "--every": "evaluate=100000,checkpoint=50,show=10",
            "--output": output,
        }
        flags = [str(part) for pair in named.items() for part in pair]
        return [sys.executable, "-m", "indexcache_search.distill", "--model", str(model), *words, *flags]


def write_data(plan: Plan) -> None:
    """Write the training and the held-out sequences, as `indexcache-distill` reads them."""
    options = plan.options
    seeds = len(options.seeds)
    count = options.batch_size * (options.warmup_steps + options.steps)
    count = count if seeds == 1 else 2 * count  # other seeds take other sequences
    for name, part, sequences in (("training", "train", count + 64), ("held-out", "evaluation", 4 * HELD_OUT)):
        path = plan.folder / f"{name}.jsonl"
        if path.exists():
            continue
        batches, partial = Batches(options.corpus, part, options.length, 16, seed=1), path.with_suffix(".partial")
        with partial.open("w") as file:
            for number in range(-(-sequences // 16)):
                tokens, kind = batches[number]
                for ids, mask in zip(tokens.tolist(), scored(kind).tolist(), strict=True):
                    file.write(json.dumps({"input_ids": ids, "loss_mask": mask}, separators=(",", ":")) + "\n")
        partial.rename(path)


def run(steps: Sequence[Step], at_once: int, gpus: int, logs: Path) -> None:
    """Run the steps whose results are not there, each once what it needs is there; several side by side.

    Raises:
        SystemExit: if one fails, when those that run have ended.
    """
    waiting = [step for step in steps if not step.result.exists()]
    running: list[tuple[Step, int, subprocess.Popen[bytes], float]] = []
    failed: list[str] = []
    logs.mkdir(parents=True, exist_ok=True)
    while running or (waiting and not failed):
        ready = [step for step in waiting if step.needs is None or step.needs.exists()]
        if waiting and not ready and not running:
            raise SystemExit(f"{waiting[0].name}: {waiting[0].needs} is missing")
        for step in [] if failed else ready[: at_once - len(running)]:
            waiting.remove(step)
            busy = [gpu for _, gpu, _, _ in running]
            gpu = min(range(gpus), key=busy.count)
            alone = {} if step.name == DENSE else {"CUDA_VISIBLE_DEVICES": str(gpu)}
            print(f"{step.name}: {' '.join(step.command)}", flush=True)
            with (logs / f"{step.name}.log").open("ab") as file:
                process = subprocess.Popen(step.command, stdout=file, stderr=file, env={**os.environ, **alone})
            running.append((step, gpu, process, time.monotonic()))
        time.sleep(0.2)
        for item in [item for item in running if item[2].poll() is not None]:
            running.remove(item)
            step, _, process, began = item
            print(f"{step.name}: exit code {process.returncode} after {time.monotonic() - began:.0f} s", flush=True)
            if process.returncode:
                failed.append(step.name)
    if failed:
        raise SystemExit(f"{failed[0]} failed, see {logs / failed[0]}.log")


def evaluation_set(plan: Plan) -> ComparisonSet:
    """Make the held-out set: text, and samples of each task."""
    options, model = plan.options, str(plan.base / "model")
    description = describe_model(model)
    text = plan.folder / "text.jsonl"
    text.write_bytes((options.corpus / "evaluation.jsonl").read_bytes())
    vocab_size = json.loads((plan.base / "model" / "config.json").read_text())["vocab_size"]
    reader = TokenReader(lambda: load_tokenizer(model), vocab_size, options.length)
    return build(
        reader,
        description,
        [str(text)],
        TASK_NAMES,
        str(text),
        seq_len=options.length,
        sequences=options.text_sequences,
        samples=options.samples,
        chat=False,
    )


def evaluate(plan: Plan, row: Row, held_out: ComparisonSet) -> dict[str, Any]:
    """Return losses, right tokens and tokens of each sequence."""
    layers = describe_model(str(plan.base / "model")).num_layers
    if row.name == DENSE and not row.model.exists():
        # What it becomes while all is selected: the same outputs, and the same code evaluates it.
        start = DenseStart.read(str(plan.dense), IndexerSize(**{**vars(plan.size), "topk": plan.options.length}))
        assert start is not None
        partial = row.model.with_suffix(".partial")
        partial.mkdir(exist_ok=True)
        convert(plan.dense, start, 0, partial)
        partial.rename(row.model)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = TransformersEngine.load(
        str(row.model), "auto", dtype, batch_size=plan.options.eval_batch, prefix_cache_gb=0
    )
    [found] = engine.evaluate([plan.pattern(row, layers)], held_out.data, "nll")
    pattern = str(found.pattern)
    return {
        "row": row.name,
        "seed": row.seed,
        "pattern": pattern,
        "seconds": round(found.seconds, 1),
        "losses": found.losses,
        "correct": found.correct,
        "tokens": found.tokens,
    }


def means(results: Sequence[Mapping[str, Any]], name: str, key: str, rows: np.ndarray) -> np.ndarray:
    """Return the mean of each seed of a row, of `losses` or `correct` a token: `[seeds, sequences]`."""
    found = [item for item in results if item["row"] == name]
    tokens = np.array([item["tokens"] for item in found], float)[:, rows]
    values = np.array([item[key] for item in found], float)[:, rows]
    kept = tokens[0] > 0
    return np.asarray(values[:, kept] / tokens[:, kept])


def table(results: Sequence[Mapping[str, Any]], rows: Sequence[Row], groups: Mapping[str, np.ndarray]) -> str:
    """Make a Markdown table: each loss, and the difference from the row's reference with its standard error.

    Differences are paired by sequence. With several seeds each sequence's mean over them counts.
    """
    lines = ["| | seeds |" + "".join(f" {name} loss | {name} right |" for name in groups)]
    lines.append("|---|---:|" + "---:|---:|" * len(groups))
    lines[0] = lines[0].replace(" text right |", "")
    lines[1] = lines[1][: -len("---:|")]
    done = {item["row"] for item in results}
    for name, reference in dict.fromkeys((row.name, row.reference) for row in rows):
        if name not in done or reference not in done:
            continue
        cells = [name, str(sum(item["row"] == name for item in results))]
        for group, numbers in groups.items():
            ours, theirs = (means(results, item, "losses", numbers).mean(0) for item in (name, reference))
            change = ours - theirs
            error = change.std(ddof=1) / len(change) ** 0.5
            cells.append(f"{ours.mean():.4f}" + ("" if name == reference else f" ({change.mean():+.4f} ±{error:.4f})"))
            if group != "text":
                cells.append(f"{means(results, name, 'correct', numbers).mean():.1%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def recovered(results: Sequence[Mapping[str, Any]], groups: Mapping[str, np.ndarray]) -> str:
    """Say how much of what training-free uniform loses the trained ones recover, by group and seed."""
    lines = []
    free, control = f"uniform {SHARE}, training-free", f"{BASE}, trained as long"
    for group, numbers in groups.items():
        lost = (means(results, free, "losses", numbers) - means(results, BASE, "losses", numbers)).mean()
        for name in (f"uniform {SHARE}, trained", f"uniform {SHARE}, trained, own layer's loss"):
            left = (means(results, name, "losses", numbers) - means(results, control, "losses", numbers)).mean(1)
            shares = ", ".join(f"{1 - item / lost:.0%}" for item in left)
            lines.append(f"{name}, {group}: {1 - left.mean() / lost:.0%} of {lost:+.4f} recovered (by seed: {shares})")
    return "\n".join(lines)


def main(options: argparse.Namespace) -> None:
    plan = Plan(options)
    plan.folder.mkdir(parents=True, exist_ok=True)
    trainings = plan.training_steps()
    for step in (plan.dense_step(), *trainings):
        state = "done" if step.result.exists() else f"about {step.seconds:.0f} s on an H100"
        print(f"{step.name}: {state}", flush=True)
    if "dense" in options.only:
        run([plan.dense_step()], 1, options.gpus, plan.folder / "logs")
    if "train" in options.only:
        write_data(plan)
        run(trainings, options.at_once, options.gpus, plan.folder / "logs")
    if "evaluate" not in options.only:
        return
    set_quiet()
    held_out = evaluation_set(plan)
    layers = describe_model(str(plan.base / "model")).num_layers
    log = plan.folder / "results.jsonl"
    results = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    rows = [row for row in plan.rows(layers) if row.name == DENSE or row.model.exists()]
    for row in rows:
        if any((item["row"], item["seed"]) == (row.name, row.seed) for item in results):
            continue
        results.append(evaluate(plan, row, held_out))
        with log.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
        print(f"{row.name}: {results[-1]['seconds']} s", flush=True)
    sources = [name.removesuffix("-style") for name in held_out.data.sources]
    number_of = {
        "text": [0],
        **{name: [sources.index(item) for item in names] for name, names in GROUPS.items() if name != "text"},
    }
    groups = {name: np.flatnonzero(np.isin(held_out.data.source_of, numbers)) for name, numbers in number_of.items()}
    print(table(results, rows, groups))
    print(recovered(results, groups))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus8192"))
    parser.add_argument("--output", type=Path, default=Path("build/scale"))
    parser.add_argument("--only", default="dense,train,evaluate", help="which of these, in this order")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=3, help="trainings side by side")
    parser.add_argument("--dense-seconds", type=float, default=600.0)
    parser.add_argument("--dense", default="", help="more words for scripts.demo_model.train_dense_mla")
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--index-heads", type=int, default=8)
    parser.add_argument("--index-dim", type=int, default=128)
    parser.add_argument("--index-topk", type=int, default=256)
    parser.add_argument("--warmup-steps", type=int, default=40)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--indexer-lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--text-sequences", type=int, default=48)
    parser.add_argument("--samples", type=int, default=48, help="of each task")
    parser.add_argument("--eval-batch", type=int, default=8)
    parser.add_argument("--warmup-pace", type=float, default=1.0, help="seconds of a warm-up step, for the estimates")
    parser.add_argument("--sparse-pace", type=float, default=1.0, help="seconds of a sparse step, for the estimates")
    parser.add_argument("--search-seconds", type=float, default=120.0, help="of the search, for the estimates")
    main(parser.parse_args())
