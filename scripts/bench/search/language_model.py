"""Search a language model with several seeds, and judge all that is found on packages that it was not trained on.

    python -m scripts.bench.search.scale --corpus build/corpus --output build/scale ...    # trains the model
    python -m scripts.bench.search.language_model --model build/scale/searched/all-layers/model --corpus build/corpus \
        --output build/language --gpus 2 --seconds 600

Searches read documents that were kept from training, prose and code apart, and recall sequences. Patterns are judged on
packages of which nothing was trained on, recall sequences made of these, and generated tasks. Of each seed one search
finds F and S, and the next ones, from the same evaluations, what takes a share of a prompt's time. Seed 0 searches at
half and twice the length as well, with samples of the generated tasks beside (`tasks`), on an eighth (`few`) and a
quarter (`some`) of the sequences, and by the paper's Algorithm 1 on a quarter, which costs as much as lazy on all. Then
`indexcache-eval` compares all of it with uniform patterns of all phases and with all F in blocks, at the length and
twice the length. The last quarter of each sequence counts, and selects query by query; in `eval-LENGTH-served`, of
patterns with blocks, the last 128 tokens alone, as on a server that reads the sequence as a prompt. With `--dense`, the
model is compared with that one as well (`OUTPUT/dense-LENGTH.json`), and with `--trained` with one that trained on with
a pattern of F and S (`OUTPUT/trained-LENGTH.json`). `scripts.bench.search.language_table` prints the tables.

Each step is a command of the package, which is printed. What has ended is not done again, and the same command goes on
where it was stopped; with `--seconds`, what does not fit is said and left out. Tables are in `OUTPUT/eval-LENGTH`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.eval.held_out import ComparisonData
from indexcache_search.hf.loading import describe_model, set_quiet
from indexcache_search.workdir.lock import locked
from indexcache_train.distill.settings import IndexerSize
from scripts.bench.search.scale import RECALL, as_dsa, comparison_set, row_lines, run
from scripts.bench.search.scale_plan import Step
from scripts.demo_model.mixture import TASK_NAMES, Batches
from scripts.demo_model.recall import ANSWER
from sglang_indexcache import Pattern
from sglang_indexcache.io.atomic import write_atomically
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS
from sglang_indexcache.pattern_file.file import PatternFile

TIMES = ("0.5", "0.4", "0.37", "0.3")  # of a prompt of 131,072 tokens, by `PRICES`
PRICES = "glm-5-tp8"
SHARES = ("1/2", "1/4", "1/8")
BLOCKS = (2, 4, 8, 16)
STREAMS = {"calibration": "evaluation", "held-out": "packages"}  # the part of the corpus that each comes from
KINDS = {"text": "prose", "code": "code"}
SOURCES = (*KINDS, "recall")

Run = tuple[Callable[[], Path], Pattern]
"""A model's folder, which is made if need be, and the pattern that it runs with."""


def write_data(options: argparse.Namespace, length: int) -> None:
    """Write calibration and held-out rows of each source, of `length` tokens each."""
    arrays = np.load(options.corpus / "corpus.npz")
    for seed, (use, part) in enumerate(STREAMS.items()):
        for source in SOURCES:
            path = data_file(options, use, source, length)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if source in KINDS:
                stream = arrays[f"{part}-{KINDS[source]}"]
                windows = stream[: len(stream) // length * length].reshape(-1, length)
                chosen = np.random.default_rng(seed).permutation(len(windows))[: options.rows]
                lines = [json.dumps({"input_ids": row}) + "\n" for row in windows[chosen].tolist()]
            else:
                batches = Batches(options.corpus, part, length, 4, seed=3 + seed, tasks=0.0, mixture=RECALL)
                drawn = (batches[number] for number in range(-(-options.rows // 4)))
                lines = [line for tokens, kind in drawn for line in row_lines(tokens, kind == ANSWER)]
            write_atomically(path, "".join(lines))


def data_file(options: argparse.Namespace, use: str, source: str, length: int) -> Path:
    """Return where the rows of a source lie."""
    folder: Path = options.output / "data"
    return folder / f"{use}-{source}-{length}.jsonl"


def searches(options: argparse.Namespace) -> list[Step]:
    """Return all searches; those of one seed and length follow each other, since they share a journal."""
    steps = []
    for seed in options.seeds:
        before: Path | None = None
        for name, words in (
            (f"seed{seed}", []),
            *((f"seed{seed}-{share}", ["--prefill", f"{share}:prices={PRICES}"]) for share in TIMES),
        ):
            steps.append(_search(options, name, words, options.length, seed, f"work-{seed}", before))
            before = steps[-1].result
    for length in (options.length // 2, 2 * options.length):
        steps.append(_search(options, f"seed0-{length}-tokens", [], length, 0, f"work-{length}", None))
    samples = options.output / "data" / f"tasks-{options.length}"
    named = {"--model": options.model, "--seq-len": options.length, "--samples": 24, "--tasks": ",".join(TASK_NAMES)}
    named |= {"--haystack": data_file(options, "calibration", "text", options.length), "--output": samples}
    command = [sys.executable, "-m", "indexcache_tasks", *(str(part) for pair in named.items() for part in pair)]
    steps.append(Step("samples", command, samples, 20.0))
    before = samples
    for name, words in (("tasks", []), ("tasks-0.37", ["--prefill", f"0.37:prices={PRICES}"])):
        words = [*words, "--calibration", str(samples)]
        steps.append(_search(options, name, words, options.length, 0, "work-tasks", before))
        before = steps[-1].result
    for name, words, part in (("few", [], 8), ("some", [], 4), ("algorithm1", ["--strategy", "greedy"], 4)):
        steps.append(_search(options, name, words, options.length, 0, f"work-{name}", None, part))
    return steps


def _search(
    options: argparse.Namespace,
    name: str,
    words: list[str],
    length: int,
    seed: int,
    work: str,
    needs: Path | None,
    part: int = 1,
) -> Step:
    """Return a search on one of `part` equal parts of its tokens."""
    output = options.output / name
    named = {
        "--seq-len": length,
        "--reply": length // 4,
        "--num-sequences": max(3, options.search_tokens // part // length),
        "--num-eval-sequences": 6,  # judged by indexcache-eval
        "--retain": ",".join(SHARES),
        "--seed": seed,
        "--output": output,
        "--work-dir": options.output / work,
        "--engine": f"transformers:prefix_cache_gb={options.cache_gb:g}",
    }
    sources = [*_data(options, "calibration", length), *_data(options, "held-out", length)]
    command = [sys.executable, "-m", "indexcache_search", *_flags(options, named), *sources, *words]
    return Step(name, command, output / "pattern.yaml", options.search_seconds, needs)


def _data(options: argparse.Namespace, use: str, length: int) -> list[str]:
    flag = "--calibration" if use == "calibration" else "--evaluation"
    return [word for source in SOURCES for word in (flag, str(data_file(options, use, source, length)))]


def _flags(options: argparse.Namespace, named: dict[str, object]) -> list[str]:
    both = {"--model": options.model, "--dtype": options.dtype, "--batch-size": options.batch_size}
    return [str(part) for pair in {**both, **named}.items() for part in pair]


def patterns(options: argparse.Namespace) -> dict[str, str]:
    """Return by name what the searches that ended have found, similarity's patterns, and all F in blocks."""
    found: dict[str, str] = {}
    for step in searches(options):
        if step.name == "samples" or not step.result.exists():
            continue
        if "--prefill" in step.command:
            found[step.name] = str(PatternFile.load(step.result).as_pattern())
        else:
            for share in SHARES:
                letters = PatternFile.load(f"{step.result}@{share}").as_pattern()
                found[f"{step.name}-{share.replace('/', 'of')}"] = str(letters)
    figures = options.output / f"seed{options.seeds[0]}" / "metrics.json"
    if figures.exists():
        rows = json.loads(figures.read_text())["held_out"]["rows"]
        similar = [row for row in rows if row["name"] == "similarity"]
        found |= {f"similarity-{row['retention'].replace('/', 'of')}": row["pattern"] for row in similar}
    layers = describe_model(str(options.model)).num_layers
    for size in BLOCKS:
        found[f"all-q{size}"] = "F" * layers + "".join(f"+{layer}q{size}" for layer in range(layers))
    return found


def comparisons(options: argparse.Namespace) -> list[Step]:
    """Return one comparison for each length, and one of blocks in all of a prompt that a server reads in blocks."""
    steps, found = [], patterns(options)
    blocks = {name: letters for name, letters in found.items() if "+" in letters}
    for name, length, reply, compared in (
        (f"eval-{options.length}", options.length, options.length // 4, found),
        (f"eval-{2 * options.length}", 2 * options.length, options.length // 2, found),
        (f"eval-{options.length}-served", options.length, EXACT_ROWS, blocks),
    ):
        output = options.output / name
        named = {
            "--seq-len": length,
            "--reply": reply,
            "--num-sequences": max(3, options.eval_tokens // length),
            "--tasks": f"{','.join(TASK_NAMES)}:samples={options.samples},"
            f"haystack={data_file(options, 'held-out', 'text', length)}",
            "--engine": f"transformers:prefix_cache_gb={options.cache_gb:g}",
            "--output": output,
        }
        command = [sys.executable, "-c", "from indexcache_search.__main__ import evaluate; evaluate()"]
        command += [*_flags(options, named), *_data(options, "held-out", length)]
        command += [word for item in compared.items() for word in ("--pattern", "=".join(item))]
        command += [] if compared is found else ["--no-uniform"]
        steps.append(Step(output.name, command, output / "eval.json", options.eval_seconds))
    return steps


def compare_models(options: argparse.Namespace, length: int) -> None:
    """Compare the model with others on the sequences that the comparison of this length reads; write a file for each.

    `dense-LENGTH.json`: the dense model that it was made of, and what the model loses against that.
    `trained-LENGTH.json`: a model that trained on with a pattern, and what it and the model lose by that pattern
    against all F of the model. `indexcache-eval` takes one model, and none that selects everything.
    """
    layers = Pattern.full(describe_model(str(options.model)).num_layers)
    if options.dense:
        size = IndexerSize(heads=8, dim=128, topk=length)
        dense = partial(as_dsa, options.dense, size, options.output / f"dense-model-{length}")
        runs: dict[str, Run] = {"dense": (dense, layers), "DSA": (lambda: options.model, layers)}
        _compare(options, length, options.output / f"dense-{length}.json", runs)
    if options.trained:
        native = describe_model(str(options.trained)).native
        runs = {"own": (lambda: options.model, layers), "untrained": (lambda: options.model, native)}
        runs |= {"trained": (lambda: options.trained, native)}
        _compare(options, length, options.output / f"trained-{length}.json", runs)


def _compare(options: argparse.Namespace, length: int, path: Path, runs: dict[str, Run]) -> None:
    """Write the losses of each run by source, and how much they rise over the first one's."""
    if path.exists():
        return
    set_quiet()
    asked = ComparisonData(
        sources=tuple(str(data_file(options, "held-out", source, length)) for source in SOURCES),
        seq_len=length,
        sequences=max(3, options.eval_tokens // length),
        tasks=TASK_NAMES,
        haystack=str(data_file(options, "held-out", "text", length)),
        samples=options.samples,
        reply=length // 4,
    )
    load = cache(
        partial(TransformersEngine.load, dtype=options.dtype, batch_size=options.batch_size, prefix_cache_gb=0)
    )
    data, losses = comparison_set(options.model, asked).data, {}
    for name, (folder, pattern) in runs.items():
        [found] = load(str(folder())).evaluate([pattern], data, "nll")
        losses[name] = np.array(found.losses) / np.array(found.tokens)
    first, rows = losses[next(iter(runs))], {}
    for number, source in enumerate(data.sources):
        chosen = data.source_of == number
        rows[source] = {name: _row(values[chosen], first[chosen]) for name, values in losses.items()}
    write_atomically(path, json.dumps(rows, indent=1) + "\n")
    for source, by_run in rows.items():
        told = (
            f"{name} {row['loss']:.4f} ({row['increase']:+.4f} ±{row['error']:.4f})" for name, row in by_run.items()
        )
        print(f"{length} tokens, {source}: {', '.join(told)}", flush=True)


def _row(losses: NDArray[np.float64], first: NDArray[np.float64]) -> dict[str, Any]:
    change = losses - first
    error = change.std(ddof=1) / len(change) ** 0.5
    return {"loss": losses.mean(), "increase": change.mean(), "error": error, "losses": losses.tolist()}


def forget_old(comparison: Step) -> None:
    """Remove a comparison's result if it lacks a pattern; what was evaluated stays in its journal."""
    asked = {word.partition("=")[0] for flag, word in pairwise(comparison.command) if flag == "--pattern"}
    result = comparison.result
    if result.exists() and not asked <= {row["name"] for row in json.loads(result.read_text())["held_out"]["rows"]}:
        result.unlink()


def main(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.seconds if options.seconds else math.inf
    options.output.mkdir(parents=True, exist_ok=True)
    with locked(options.output, "scripts.bench.search.language_model"):
        for length in (options.length // 2, options.length, 2 * options.length):
            write_data(options, length)
        left = [step for step in searches(options) if not step.result.exists()]
        print(f"{len(left)} searches of about {options.search_seconds:.0f} s each at first", flush=True)
        failed: SystemExit | None = None
        kept = options.eval_seconds
        try:
            run(left, options.at_once, options.gpus, options.output, lambda: end - kept - time.monotonic())
        except SystemExit as error:  # the others went on, and are compared
            failed = error
        compared = comparisons(options)
        for step in compared:
            forget_old(step)
        run(compared, options.at_once, options.gpus, options.output, lambda: end - time.monotonic())
        for length in (options.length, 2 * options.length):
            compare_models(options, length)
    if failed is not None:
        raise failed


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dense", type=Path, help="the dense model that it was made of, to compare with")
    parser.add_argument("--trained", type=Path, help="a model that trained on with a pattern, to compare with")
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--output", type=Path, default=Path("build/language"))
    parser.add_argument("--length", type=int, default=4096, help="tokens; half and twice as many are tried as well")
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=96, help="of each source, calibration and held-out")
    parser.add_argument("--search-tokens", type=int, default=262_144, help="of the sequences of a search")
    parser.add_argument(
        "--greedy-tokens", type=int, default=65_536, help="of Algorithm 1's, which costs six times as much"
    )
    parser.add_argument(
        "--cache-gb", type=float, default=16.0, help="of layer outputs, on the GPU where four times as much is free"
    )
    parser.add_argument("--eval-tokens", type=int, default=589_824, help="of the sequences of a comparison")
    parser.add_argument("--samples", type=int, default=24, help="of each task")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="commands side by side on a GPU")
    parser.add_argument("--seconds", type=float, default=0.0, help="of this call; 0: no limit")
    parser.add_argument("--search-seconds", type=float, default=120.0, help="that a search is thought to take")
    parser.add_argument("--eval-seconds", type=float, default=150.0, help="that are kept for the comparisons")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
