"""The tokens that `nll` and `kl` need to rank patterns, and whether they rank alike.

    python -m scripts.bench.search.objectives                                   # the demo model
    python -m scripts.bench.search.objectives --model build/models/deep24 --device cuda --batch-size 8

Takes the flips of four steps of a search (of the first flip, and after a quarter, a half, three quarters of them),
evaluates each with both objectives on many sequences, and ranks them again on random small parts of these. Prints for
each number of sequences, mean over steps and parts: Spearman's correlation with the ranking on all sequences, and
regret: by how much the flip that the part prefers is worse than the best one, in `nll` on all sequences.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexcache_search import demo
from indexcache_search.data.tokens import TokenSet, growing_shares
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.hf.loading import set_quiet
from indexcache_search.searching.search import Search
from indexcache_search.searching.settings import Settings
from scripts.bench.search.sets import demo_sets
from sglang_indexcache import Pattern

OBJECTIVES: tuple[Objective, ...] = ("nll", "kl")


def steps_of_a_search(engine: TransformersEngine, data: TokenSet) -> list[list[Pattern]]:
    """Return the flips that are open after 0, 1/4, 1/2 and 3/4 of the flips of lazy greedy."""
    settings = Settings(retain=(Fraction(1, 8),), objective="nll")
    names = identity(engine, data, data, settings.objective)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder), names, today()) as journal:
        calibration = Evaluator(engine, data, settings.objective, journal, "calibration")
        search = Search(engine, calibration, settings.strategy, settings.goal(engine.model))
        walked = [engine.model.native, *(step.pattern for step in search.find().steps)]
    chosen = [walked[len(walked) * part // 4] for part in range(4)]
    return [[pattern.share(layer) for layer in pattern.full_layers if layer] for pattern in chosen]


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64)


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def losses(evaluations: Sequence[Evaluation], data: TokenSet, rows: Sequence[int]) -> list[float]:
    return [estimates.loss(item.on(rows), data).mean for item in evaluations]


def compare(found: dict[str, list[list[Evaluation]]], data: TokenSet, parts: int) -> list[dict[str, float]]:
    """Make a row of the table for each number of sequences."""
    everything = range(data.num_sequences)
    rng = np.random.default_rng(0)
    by_source = [np.flatnonzero(data.source_of == source) for source in range(len(data.sources))]
    table = []
    for each in (1, 2, 4, 8, 16, 32):
        if each > min(map(len, by_source)) // 2:
            break
        row = {"sequences": each * len(by_source), "nll tokens": 0.0}
        sums: dict[str, list[float]] = {}
        for _ in range(parts):
            rows = [int(one) for source in by_source for one in rng.choice(source, each, replace=False)]
            row["nll tokens"] += data.scored[rows].sum() / parts
            for step in range(len(found["nll"])):
                whole = losses(found["nll"][step], data, everything)
                for name in OBJECTIVES:
                    part = losses(found[name][step], data, rows)
                    own = losses(found[name][step], data, everything)
                    sums.setdefault(f"{name} with all {name}", []).append(correlation(part, own))
                    sums.setdefault(f"{name} with all nll", []).append(correlation(part, whole))
                    sums.setdefault(f"{name} regret", []).append(whole[int(np.argmin(part))] - min(whole))
        table.append({**row, **{name: float(np.mean(values)) for name, values in sums.items()}})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo.MODEL))
    parser.add_argument("--sequences", type=int, default=80)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--parts", type=int, default=50, help="random parts of each size")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("bench_objectives.json"))
    options = parser.parse_args()
    set_quiet()
    engine = TransformersEngine.load(options.model, options.device, batch_size=options.batch_size, prefix_cache_gb=4.0)
    data, _ = demo_sets(options.model, options.seq_len, calibration=options.sequences, held_out=12)
    rows = growing_shares(data, 1)[-1]
    steps = steps_of_a_search(engine, data)
    found: dict[str, list[list[Evaluation]]] = {name: [] for name in OBJECTIVES}
    for flips in steps:
        for name in OBJECTIVES:
            by_pattern = {item.pattern: item for item in engine.evaluate(flips, data, name, rows)}
            found[name].append([by_pattern[pattern] for pattern in flips])
    table = compare(found, data, options.parts)
    kept = {
        name: [[[item.pattern.key, item.on(sorted(rows)).losses] for item in step] for step in each]
        for name, each in found.items()
    }
    options.output.write_text(json.dumps({"table": table, "losses": kept}) + "\n")
    titles = list(table[0])
    print("| " + " | ".join(titles) + " |\n" + "|---:" * len(titles) + "|")
    for row in table:
        print("| " + " | ".join(f"{row[title]:.4g}" for title in titles) + " |")
    agreement = [
        correlation(losses(one, data, rows), losses(other, data, rows))
        for one, other in zip(found["nll"], found["kl"], strict=True)
    ]
    print("nll and kl on all sequences, by step:", ", ".join(f"{value:.3f}" for value in agreement))


if __name__ == "__main__":
    main()
