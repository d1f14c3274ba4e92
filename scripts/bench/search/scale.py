"""Training-aware IndexCache on a dense language model of 98 million weights, from the first step to the table.

    python -m scripts.large_corpus make --output build/large
    python -m scripts.large_corpus join build/large/pieces --output build/corpus
    python -m scripts.bench.search.scale --corpus build/corpus --output build/scale --gpus 2 --seconds 3600

A dense model with latent attention is trained (`scripts.demo_model.train_dense_mla`) and made DSA by
`indexcache-distill --search-first 1/4`: indexers in all layers, a search, training with the pattern found. From the
model with indexers in all layers, uniform 1/4 trains with the loss over all layers and with its own layer's alone, and
the model trains on without a pattern, so that what more training does is not taken for what the loss does. All rows are
evaluated on held-out text, on recall sequences and on samples of `indexcache-eval --tasks`; the table in
`OUTPUT/table.md` grows with each. `--only rehearse,dense,dsa` ends with the model with indexers in all layers, about
20 minutes on one H200; `scripts.bench.search.language_model` searches it, and `--only train` goes on from there.

A rehearsal comes first: the whole chain with a model of four layers and two steps a stage. It fails within a minute or
two, not after the dense training, and its pace says how many steps and seeds fit into `--seconds`. How long each part
takes is said before it begins. Each step is a command of its own, which is printed. The same command again goes on
where it was stopped. `scripts.bench.search.weights` carries a model away, and back.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from indexcache_search.data.reader import TokenReader
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.eval.held_out import ComparisonData, ComparisonSet, build
from indexcache_search.hf.loading import describe_model, load_tokenizer, read_config, set_quiet
from indexcache_train.distill.conversion import convert
from indexcache_train.distill.dense_mla import DenseStart
from indexcache_train.distill.settings import IndexerSize
from scripts.bench.search import weights
from scripts.bench.search.scale_plan import EVALUATION, MOST, REHEARSED, Plan, Sizes, Step, outline, pace, sizes_for
from scripts.bench.search.scale_table import DENSE, Row, recovered, table
from scripts.demo_model.mixture import TASK_NAMES, Batches, mixture_of, scored
from scripts.demo_model.recall import ANSWER
from scripts.demo_model.train_demo_model import MIXTURE

RECALL = {name: share for name, share in MIXTURE.items() if name != "text"}


def kept_sizes(options: argparse.Namespace, left: Callable[[], float]) -> tuple[Sizes, tuple[float, float]]:
    """Return the sizes that were chosen once for all runs of the same command, and the pace that they are for."""
    path = options.output / "sizes.json"
    if not path.exists():
        log = options.output / "rehearsal" / "searched" / "all-layers" / "log.jsonl"
        measured = pace(log) or (1.0, 1.0)
        warmup, sparse = (options.layers / REHEARSED * seconds for seconds in measured)
        found = (options.warmup_pace or warmup, options.sparse_pace or sparse)
        sizes = Sizes(options.warmup_steps or MOST // 3, options.steps or MOST - MOST // 3, options.seeds)
        if math.isfinite(left()) and None in (options.warmup_steps, options.steps):
            sizes = sizes_for(left(), found, options.seeds, options.gpus, options.at_once)
        path.write_text(json.dumps({"sizes": vars(sizes), "pace": found}) + "\n")
    kept = json.loads(path.read_text())
    return Sizes(**kept["sizes"]), tuple(kept["pace"])


def write_data(plan: Plan) -> None:
    """Write the training and the held-out sequences, as `indexcache-distill` reads them, and the recall sequences."""
    options, sizes = plan.options, plan.sizes
    count = options.batch_size * (sizes.warmup_steps + sizes.steps)
    count = count if len(sizes.seeds) == 1 else 3 * count // 2  # seeds take other sequences, in another order
    for name, part, sequences in (
        ("training", "train", count + count // 4 + 64),  # those that repeat text are left out: 1 in 12 of 3,700
        ("held-out", "evaluation", 4 * options.held_out),
        ("recall", "evaluation", 4 * options.text_sequences),
    ):
        path = plan.folder / f"{name}.jsonl"
        if path.exists():
            continue
        partial = path.with_suffix(".partial")
        more: dict[str, Any] = {"tasks": 0.0, "mixture": RECALL} if name == "recall" else {}
        shares = more or {"tasks": options.tasks, "mixture": mixture_of(options.text)}
        batches = Batches(options.corpus, part, options.length, 16, seed=2 if more else 1, **shares)
        numbers = range(-(-sequences // 16))
        workers = min(8, (os.cpu_count() or 1) // 2, len(numbers) // 4)
        drawn: Any = DataLoader(batches, batch_size=None, sampler=numbers, num_workers=workers)
        with partial.open("w") as file:
            for tokens, kind in drawn:
                file.writelines(row_lines(tokens, kind == ANSWER if more else scored(kind)))
        partial.rename(path)


def row_lines(tokens: torch.Tensor, counts: torch.Tensor) -> Iterator[str]:
    """Yield a line for each sequence of `tokens`, `[sequences, length]`, that the package's reader takes as it is.

    Args:
        tokens: ids.
        counts: which of them count, of the same shape.
    """
    for ids, mask in zip(tokens.tolist(), counts.int().tolist(), strict=True):
        yield json.dumps({"input_ids": ids, "loss_mask": mask}, separators=(",", ":")) + "\n"


def run(
    steps: Sequence[Step],
    at_once: int,
    gpus: int,
    folder: Path,
    left: Callable[[], float] = lambda: math.inf,
) -> None:
    """Run the steps whose results are not there, each once what it needs is there; several side by side on a GPU.

    A step that does not fit into the time that is left does not start, nor does one that needs it. After a failure the
    others go on. Logs are in `folder/logs`; `folder/settled` says that nothing more will come.

    Raises:
        SystemExit: if one failed, when all have ended.
    """
    waiting = [step for step in steps if not step.result.exists()]
    running: list[tuple[Step, int, subprocess.Popen[bytes], float]] = []
    failed: list[str] = []
    late: set[Path] = set()  # results for which there was no time
    taken: list[float] = []  # seconds of trainings that ended
    logs, settled = folder / "logs", folder / "settled"
    logs.mkdir(parents=True, exist_ok=True)
    settled.unlink(missing_ok=True)
    while running or waiting:
        busy = [gpu for _, gpu, _, _ in running]
        for step in [step for step in waiting if step.needs is None or step.needs.exists()]:
            working = sum(not item[0].background for item in running)
            if not step.background and working >= at_once * gpus:
                continue
            waiting.remove(step)
            need = max(taken) if taken and step.needs is not None else step.seconds
            if not step.background and need > left():
                print(f"{step.name}: not run, needs about {need:.0f} s, {left():.0f} s are left", flush=True)
                late.add(step.result)
                continue
            gpu = min(range(gpus), key=busy.count)
            busy.append(gpu)
            alone = {} if step.name == DENSE else {"CUDA_VISIBLE_DEVICES": str(gpu)}
            print(f"{step.name}: {' '.join(step.command)}", flush=True)
            with (logs / f"{step.name}.log").open("ab") as file:
                process = subprocess.Popen(step.command, stdout=file, stderr=file, env={**os.environ, **alone})
            running.append((step, gpu, process, time.monotonic()))
        if all(item[0].background for item in running):
            settled.touch()
            for step in waiting:
                print(f"{step.name}: not run, {step.needs} is missing", flush=True)
                if step.needs in late:
                    late.add(step.result)
                else:
                    failed += [] if failed else [step.name]
            waiting = []
        time.sleep(0.2)
        for item in [item for item in running if item[2].poll() is not None]:
            running.remove(item)
            step, _, process, began = item
            seconds = time.monotonic() - began
            print(f"{step.name}: exit code {process.returncode} after {seconds:.0f} s", flush=True)
            if process.returncode:
                failed.append(step.name)
            elif step.needs is not None and not step.background:
                taken.append(seconds)
    settled.touch()
    if failed:
        raise SystemExit(f"{failed[0]} failed, see {logs / failed[0]}.log")


def evaluation_set(plan: Plan) -> ComparisonSet:
    """Make the held-out set: text, recall sequences, and samples of each task."""
    options, text = plan.options, plan.folder / "text.jsonl"
    text.write_bytes((options.corpus / "evaluation.jsonl").read_bytes())
    asked = ComparisonData(
        sources=(str(text), str(plan.folder / "recall.jsonl")),
        seq_len=options.length,
        sequences=2 * options.text_sequences,
        tasks=TASK_NAMES,
        haystack=str(text),
        samples=options.samples,
    )
    return comparison_set(plan.base / "model", asked)


def comparison_set(model: Path, asked: ComparisonData) -> ComparisonSet:
    """Read the sources and generate the tasks for a model in a folder, as `indexcache-eval` does."""
    assert asked.seq_len is not None
    reader = TokenReader(lambda: load_tokenizer(str(model)), read_config(str(model)).vocab_size, asked.seq_len)
    return build(reader, describe_model(str(model)), asked, asked.seq_len)


def groups_of(held_out: ComparisonSet) -> dict[str, np.ndarray]:
    """Return the sequences of each group of columns."""
    tasks = {name: 2 + number for number, name in enumerate(TASK_NAMES)}
    number_of = {"text": [0], "recall": [1], "MRCR-like": [tasks.pop("mrcr")], "RULER-like": list(tasks.values())}
    return {name: np.flatnonzero(np.isin(held_out.data.source_of, numbers)) for name, numbers in number_of.items()}


def as_dsa(dense: Path, size: IndexerSize, output: Path) -> Path:
    """Write a dense model as a DSA one that selects everything: the same outputs, and the same code evaluates it.

    Args:
        dense: folder of the model, with latent attention.
        size: of the indexers, which select as many tokens as a sequence has.
        output: folder of the DSA model; one that is there stays.

    Returns:
        `output`.
    """
    if not output.exists():
        start = DenseStart.read(str(dense), size)
        if start is None:
            raise SystemExit(f"{dense}: no dense model with latent attention")
        partial = output.with_suffix(".partial")
        partial.mkdir(exist_ok=True)
        convert(dense, start, 0, partial)
        partial.rename(output)
    return output


def evaluate(plan: Plan, row: Row, held_out: ComparisonSet) -> dict[str, Any]:
    """Return losses, right tokens and tokens of each sequence."""
    layers = describe_model(str(plan.base / "model")).num_layers
    if row.name == DENSE:
        as_dsa(plan.dense, IndexerSize(**{**vars(plan.size), "topk": plan.options.length}), row.model)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = TransformersEngine.load(
        str(row.model), "auto", dtype, batch_size=plan.options.eval_batch, prefix_cache_gb=0
    )
    [found] = engine.evaluate([plan.pattern(row, layers)], held_out.data, "nll")
    return {
        "row": row.name,
        "seed": row.seed,
        "pattern": str(found.pattern),
        "seconds": round(found.seconds, 1),
        "losses": found.losses,
        "correct": found.correct,
        "tokens": found.tokens,
    }


def evaluate_rows(plan: Plan, wait: bool) -> None:
    """Evaluate the rows that are ready, and write the table after each.

    With `wait`, until `settled` says that no more will come.
    """
    set_quiet()
    held_out, rows, log = evaluation_set(plan), plan.rows(), plan.folder / "results.jsonl"
    groups = groups_of(held_out)
    while True:
        settled = (plan.folder / "settled").exists()  # before the look at what is ready
        results = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        done = {(item["row"], item["seed"]) for item in results}
        ready = [row for row in rows if (row.name, row.seed) not in done and plan.is_ready(row)]
        for row in ready[:1]:
            results.append(evaluate(plan, row, held_out))
            with log.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
            print(f"{row.name}: {results[-1]['seconds']} s", flush=True)
            text = f"{table(results, rows, groups)}\n\n{recovered(results, groups)}\n"
            (plan.folder / "table.part").write_text(text)
            (plan.folder / "table.part").rename(plan.folder / "table.md")
        if not ready:
            if settled or not wait:
                return
            time.sleep(1)


def rehearse(options: argparse.Namespace) -> None:
    """Run the whole chain in small, so that what fails does so before the dense training.

    Raises:
        SystemExit: if a part of it fails, or a row is missing, or its loss is not finite.
    """
    folder = options.output / "rehearsal"
    if (folder / "passed").exists():
        return
    few = {"layers": REHEARSED, "seeds": [0], "held_out": 4, "text_sequences": 2, "samples": 2, "at_once": 4}
    small = argparse.Namespace(
        **{**vars(options), **few, "output": folder, "warmup_steps": 2, "steps": 2},
    )
    small.dense = f"{options.dense} --steps 1,0,0,0,1 --no-compile --show 1"
    began = time.monotonic()
    work(small, ["dense", "train"], lambda: math.inf)
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    missing = {row.name for row in Plan(small, Sizes(2, 2, [0])).rows()} - {item["row"] for item in results}
    if missing:
        raise SystemExit(f"rehearsal: {', '.join(sorted(missing))} not evaluated, see {folder / 'logs'}")
    for item in results:
        if not np.isfinite(item["losses"]).all() or not sum(item["tokens"]):
            raise SystemExit(f"rehearsal: losses of {item['row']} are {item['losses']}, expected numbers")
    seconds = pace(folder / "searched" / "all-layers" / "log.jsonl")
    if seconds is None:
        raise SystemExit("rehearsal: its training has no pace, expected two steps of both stages")
    print((folder / "table.md").read_text())
    print(f"{REHEARSED} layers: a warm-up step took {seconds[0]:.2f} s, a sparse one {seconds[1]:.2f} s")
    print(f"rehearsal: passed after {time.monotonic() - began:.0f} s", flush=True)
    (folder / "passed").touch()


def work(options: argparse.Namespace, parts: Sequence[str], left: Callable[[], float]) -> None:
    """Do the parts, in this order: the dense training, then all others with their evaluation."""
    options.output.mkdir(parents=True, exist_ok=True)
    if "dense" in parts:
        dense = Plan(options, Sizes(1, 1, options.seeds)).dense_step()
        run([dense], 1, 1, options.output, left)
    if not {"dsa", "train", "evaluate"} & {*parts}:
        return
    plan = Plan(options, *kept_sizes(options, left))
    if "dsa" in parts:
        write_data(plan)
        run([plan.dsa_step()], 1, 1, options.output, left)
    if "train" in parts:
        print(f"{plan.sizes}, {plan.pace[0]:.2f} and {plan.pace[1]:.2f} s a step, {left():.0f} s left")
        print(outline(plan, ["train"]), flush=True)
        write_data(plan)
        steps = [*plan.training_steps(), plan.evaluation_step()]
        run(steps, options.at_once, options.gpus, options.output, lambda: left() - EVALUATION)
    if "evaluate" in parts:
        evaluate_rows(plan, options.wait)


def export(plan: Plan, dtype: str) -> None:
    """Write pieces of the models that are there into `OUTPUT/pieces`, each model's once."""
    models = {"dense": plan.dense, "all-layers": plan.base / "model", "trained": plan.searched / "trained" / "model"}
    for name, model in models.items():
        folder = plan.folder / "pieces" / name
        if not (model / weights.WEIGHTS).exists() or (folder / weights.MANIFEST).exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
        paths = weights.write_pieces(model, folder, dtype)
        print(f"{folder}: {len(paths)} files, {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB", flush=True)


def main(options: argparse.Namespace) -> None:
    began, parts = options.output / "began", options.only.split(",")
    options.output.mkdir(parents=True, exist_ok=True)
    if not began.exists():
        began.write_text(f"{time.time()}\n")
    end = float(began.read_text()) + options.seconds if options.seconds else math.inf
    if parts != ["evaluate"]:
        guess = Sizes(options.warmup_steps or MOST // 3, options.steps or MOST - MOST // 3, options.seeds)
        print("before the rehearsal, with 1 s a step:")
        print(outline(Plan(options, guess), parts), flush=True)
    if "rehearse" in parts:
        rehearse(options)
    work(options, parts, lambda: end - time.time())
    if options.export_pieces:
        export(Plan(options, Sizes(1, 1, options.seeds)), options.export_pieces)
    if "train" in parts and (options.output / "table.md").exists():
        print((options.output / "table.md").read_text())


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--output", type=Path, default=Path("build/scale"))
    parser.add_argument(
        "--only", default="rehearse,dense,train", help="which of rehearse, dense, dsa, train, evaluate, in this order"
    )
    parser.add_argument("--export-pieces", choices=("int8", "bf16"), help="write the models in pieces of 16 MB as well")
    parser.add_argument("--wait", action="store_true", help="evaluate what comes, until all trainings have ended")
    parser.add_argument("--seconds", type=float, default=0.0, help="of all, from the first start; 0: no limit")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="trainings side by side on a GPU")
    parser.add_argument("--dense-seconds", type=float, default=720.0)
    parser.add_argument("--dense-gpus", type=int, help="of the dense training, if not all")
    parser.add_argument("--dense-tokens", type=int, default=65536, help="of a step of the dense training")
    parser.add_argument("--dense", default="", help="more words for scripts.demo_model.train_dense_mla")
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0, 1, 2])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--passes", type=float, default=3.0, help="of the dense training over the corpus, at most")
    parser.add_argument("--tasks", type=float, default=0.1, help="share of the sequences that are samples of tasks")
    parser.add_argument("--text", type=float, default=0.7, help="share of text alone among the others")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the last sequences of the dense training")
    parser.add_argument("--length", type=int, default=8192, help="tokens of all sequences behind the dense training")
    parser.add_argument("--index-heads", type=int, default=8)
    parser.add_argument("--index-dim", type=int, default=128)
    parser.add_argument("--index-topk", type=int, default=256)
    parser.add_argument("--warmup-steps", type=int, help="as many as fit into --seconds unless given")
    parser.add_argument("--steps", type=int, help="as many as fit into --seconds unless given")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--indexer-lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=16, help="sequences of indexcache-distill's held-out set")
    parser.add_argument("--text-sequences", type=int, default=48, help="of text, and again of recall")
    parser.add_argument("--samples", type=int, default=48, help="of each task")
    parser.add_argument("--eval-batch", type=int, default=4)
    parser.add_argument("--warmup-pace", type=float, help="seconds of a warm-up step; the rehearsal's unless given")
    parser.add_argument("--sparse-pace", type=float, help="seconds of a sparse step; the rehearsal's unless given")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
