"""The paper's Table 3 in small: training-aware IndexCache on the demo model, beside the training-free patterns.

    python -m scripts.demo_model.corpus --output build/corpus
    python -m scripts.bench.search.distill --corpus build/corpus --output build/distill --seeds 0,1,2

Every row starts from the demo model, whose indexers each know their own layer only, and trains on as many sequences in
the same order with `indexcache-distill`'s own code: the original model, too, so that what more training does is not
taken for what the loss does. What comes out is evaluated from its checkpoint on fresh text and recall sequences.

The same command again goes on where it was stopped; --rows and --seeds take a part of the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from indexcache_search import demo
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.evaluation import estimates
from indexcache_search.hf.loading import describe_model
from indexcache_train.distill.run import run
from indexcache_train.distill.settings import DistillSettings, Loss, TrainingRuntime
from indexcache_train.training.sets import TrainingData
from indexcache_train.training.settings import Folders, Intervals
from scripts.bench.timing import timed
from scripts.demo_model.recall import ANSWER, TEXT, UNSCORED, RecallTasks
from scripts.demo_model.train_demo_model import MIXTURE
from sglang_indexcache import Pattern
from sglang_indexcache.pattern_file.file import PatternFile

RECALL = ("kv_mix", "kv_end", "chain", "multi", "update", "copy")


@dataclass(frozen=True)
class Row:
    """A row of the table: a pattern, and the loss that indexers learn from; without one nothing is trained."""

    name: str
    pattern: Pattern
    loss: Loss | None


def rows(layers: int) -> list[Row]:
    searched = PatternFile.load(f"{demo.FOLDER / 'patterns' / 'lazy.yaml'}@1/2").as_pattern()
    half, quarter = Pattern.uniform(layers, 2), Pattern.uniform(layers, 4)
    return [
        Row("original, not trained", Pattern.full(layers), None),
        Row("1/2 uniform, training-free", half, None),
        Row("1/2 searched, training-free", searched, None),
        Row("1/4 uniform, training-free", quarter, None),
        Row("original", Pattern.full(layers), "own"),
        Row("1/2 uniform", half, "multi"),
        Row("1/2 searched", searched, "multi"),
        Row("1/2 uniform, no cross-layer loss", half, "own"),
        Row("1/4 uniform", quarter, "multi"),
        Row("1/4 uniform, no cross-layer loss", quarter, "own"),
    ]


def write_training(tasks: RecallTasks, path: Path, sequences: int, length: int) -> None:
    """Write sequences of the mixture that the demo model was trained on, as the trainer reads them."""
    if path.exists():
        return
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        for _ in range(-(-sequences // 32)):
            batch = tasks.mixture(MIXTURE, 32, length)
            for tokens, kind in zip(batch.tokens.tolist(), batch.kind.tolist(), strict=True):
                mask = [int(value != UNSCORED) for value in kind]
                file.write(json.dumps({"input_ids": tokens, "loss_mask": mask}) + "\n")
    partial.rename(path)


def held_out(tasks: RecallTasks, names: Sequence[str], kind: int, each: int, length: int, index_topk: int) -> TokenSet:
    """Draw `each` sequences of every task; only tokens of `kind` count, behind those where all patterns are equal."""
    batches = [tasks.sample(name, each, length) for name in names]
    tokens = torch.cat([batch.tokens for batch in batches]).cpu().numpy().astype(np.int32)
    scored = (torch.cat([batch.kind for batch in batches]).cpu().numpy() == kind) & (np.arange(length) > index_topk)
    return TokenSet(tokens, scored, np.repeat(np.arange(len(names)), each), tuple(names))


def evaluate(model: str, pattern: Pattern, sets: dict[str, TokenSet], device: str) -> dict[str, float]:
    """Return the loss on text, and loss and share of right answers on recall."""
    engine = TransformersEngine.load(model, device, "float32", batch_size=8, prefix_cache_gb=0)
    found = {}
    for name, data in sets.items():
        [evaluation] = engine.evaluate([pattern], data, "nll")
        found[f"{name} loss"] = estimates.loss(evaluation, data).mean
        found[f"{name} right"] = sum(evaluation.correct) / sum(evaluation.tokens)
    return found


def train(row: Row, seed: int, data: TrainingData, options: argparse.Namespace, folder: Path) -> str:
    """Train a row; return the folder of the model."""
    assert row.loss is not None
    settings = DistillSettings(
        pattern=row.pattern,
        loss=row.loss,
        warmup_steps=options.warmup_steps,
        sparse_steps=options.steps,
        warmup_lr=1e-3,
        indexer_lr=options.indexer_lr,
        lr=options.lr,
        ramp_steps=30,
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        seed=seed,
    )
    runtime = TrainingRuntime(
        device=options.device,
        dtype="auto",
        attention=options.attention,
        gradient_checkpointing=options.gradient_checkpointing,
        intervals=Intervals(evaluate=100_000, checkpoint=100, show=20),
    )
    run(
        str(demo.MODEL),
        data,
        settings,
        runtime,
        Folders(folder, restart=False),
        console=Console(stderr=True, highlight=False),
    )
    return str(folder / "model")


def table(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Make a Markdown table of means over seeds, with standard errors where there are several."""
    lines = ["| | text loss | recall loss | recall right |", "|---|---:|---:|---:|"]
    for name in names:
        cells = []
        for key, form in (("text loss", ".4f"), ("recall loss", ".4f"), ("recall right", ".1%")):
            values = np.array([result[key] for result in results if result["row"] == name])
            if not len(values):
                break
            error = f" ±{values.std(ddof=1) / len(values) ** 0.5:{form}}" if len(values) > 1 else ""
            cells.append(f"{values.mean():{form}}{error}")
        if cells:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def recovered(results: Sequence[dict[str, Any]], key: str, trained: str) -> str:
    """Say how much of the loss of the training-free 1/4 a trained row recovers, per seed."""

    def of(name: str, seed: int | None) -> float:
        return float(next(item[key] for item in results if item["row"] == name and item["seed"] == seed))

    seeds = sorted({item["seed"] for item in results if item["row"] == trained} - {None})
    lost = of("1/4 uniform, training-free", None) - of("original, not trained", None)
    shares = [1 - (of(trained, seed) - of("original", seed)) / lost for seed in seeds]
    each = ", ".join(f"{share:.0%}" for share in shares)
    return f"{trained}, {key}: {np.mean(shares):.0%} of {lost:+.4f} recovered (by seed: {each})"


def main(options: argparse.Namespace) -> None:
    description = describe_model(str(demo.MODEL))
    corpus = np.load(options.corpus / "corpus.npz")
    words = torch.from_numpy(corpus["words"])
    streams = {part: torch.from_numpy(corpus[part].astype(np.int32)) for part in ("train", "evaluation")}
    tasks = RecallTasks(streams["evaluation"], words, 777)
    length, topk = options.length, description.index_topk
    sets = {
        "text": held_out(tasks, ["text"], TEXT, 6 * options.held_out, length, topk),
        "recall": held_out(tasks, RECALL, ANSWER, options.held_out, length, topk),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    log = options.output / "results.jsonl"
    results = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    selected = rows(description.num_layers)
    if options.rows:
        chosen = {int(number) for number in options.rows.split(",")}
        selected = [row for number, row in enumerate(selected) if number in chosen]
    for seed in map(int, options.seeds.split(",")):
        path = options.output / f"training-{seed}.jsonl"
        sequences = options.batch_size * (options.warmup_steps + options.steps)
        write_training(RecallTasks(streams["train"], words, 1000 + seed), path, sequences + 64, length)
        data = TrainingData(
            training=(str(path),),
            evaluation=(str(path),),
            seq_len=length,
            num_sequences=sequences,
            num_eval_sequences=8,
        )
        for row in selected:
            own = None if row.loss is None else seed
            if any(item["row"] == row.name and item["seed"] == own for item in results):
                continue
            folder = options.output / f"{row.name.replace(' ', '-').replace('/', '')}-{seed}"
            model, seconds = str(demo.MODEL), 0.0
            if row.loss is not None:
                model, seconds = timed(partial(train, row, seed, data, options, folder))
            found = evaluate(model, row.pattern, sets, options.device)
            results.append({"row": row.name, "seed": own, "seconds": round(seconds, 1), **found})
            with log.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
            print(json.dumps(results[-1]), flush=True)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    about = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "options": {name: str(value) for name, value in sorted(vars(options).items())},
    }
    (options.output / "table3.json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    print(table(results, [row.name for row in rows(description.num_layers)]))
    done = {item["row"] for item in results}
    if {"original", "original, not trained", "1/4 uniform, training-free"} <= done:
        for key in ("text loss", "recall loss"):
            for name in ("1/4 uniform", "1/4 uniform, no cross-layer loss"):
                if name in done:
                    print(recovered(results, key, name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--output", type=Path, default=Path("build/distill"))
    parser.add_argument("--rows", default="", help="numbers of rows, counted from 0; default: all")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--indexer-lr", type=float, default=1e-3)
    parser.add_argument("--held-out", type=int, default=16, help="sequences of each recall task")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    main(parser.parse_args())
