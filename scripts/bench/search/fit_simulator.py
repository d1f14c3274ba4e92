"""Fit the simulator's parameters to a real model.

    python -m scripts.bench.search.fit_simulator                                       # the demo model
    python -m scripts.bench.search.fit_simulator --model build/models/deep24 --device cuda --batch-size 8

Measures, in `kl` on the calibration set of the demo: every segment of layers alone (its first layer F, its others S,
all else F) and random patterns at 1/2, 1/4 and 1/8. Prints a `Structure` of `simulated`, and how well the sum over
segments predicts the losses of the random patterns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexcache_search import demo
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.hf.loading import set_quiet
from scripts.bench.search.sets import demo_sets
from scripts.bench.search.simulated import Structure
from sglang_indexcache import Pattern

SMALLEST = 1e-7  # nats a token: less is rounding


def segments(num_layers: int) -> dict[tuple[int, int], Pattern]:
    """Return patterns in which one segment shares, by its source and end."""
    full = range(num_layers)
    return {
        (source, end): Pattern.from_full_layers(num_layers, [layer for layer in full if not source < layer < end])
        for source in full
        for end in range(source + 2, num_layers + 1)
    }


def random_patterns(num_layers: int, each: int) -> list[Pattern]:
    rng = random.Random(0)  # noqa: S311
    counts = [num_layers // share for share in (2, 4, 8) for _ in range(each)]
    return [Pattern.from_full_layers(num_layers, [0, *rng.sample(range(1, num_layers), n - 1)]) for n in counts]


def predicted(pattern: Pattern, costs: dict[tuple[int, int], float]) -> list[float]:
    """Return the costs of the segments of `pattern`, each measured alone."""
    bounds = itertools.pairwise([*pattern.full_layers, len(pattern)])
    return [costs[source, end] for source, end in bounds if end > source + 1]


def fit(
    costs: dict[tuple[int, int], float], real: list[tuple[Pattern, float]], by_kind: list[NDArray[np.float64]]
) -> tuple[Structure, dict[str, float]]:
    """Fit the parameters; return them and how good they are.

    Args:
        costs: of segments, in nats a token.
        real: random patterns and their losses.
        by_kind: of text and of recall, `[segments, sequences]` losses a token.
    """
    # Layer i adds to a segment w_i * d ** p * exp(tau * normal), by regression with a level per layer.
    rows = [
        (end - 1, np.log(end - 1 - source), np.log(more))
        for (source, end), cost in costs.items()
        if (more := cost - costs.get((source, end - 1), 0.0)) > SMALLEST
    ]
    layer, distance, added = map(np.asarray, zip(*rows, strict=True))
    x, y = (values - _level(values, layer) for values in (distance, added))
    power = float((x * y).sum() / (x * x).sum())
    levels = {one: (added - power * distance)[layer == one].mean() for one in set(layer.tolist())}
    weights = np.asarray(list(levels.values()))
    ratios, evenness = [], []
    for pattern, loss in real:
        parts = np.asarray(predicted(pattern, costs))
        ratios.append(np.log(loss / parts.sum()))
        evenness.append((parts**2).sum() / parts.sum() ** 2)
    spreads = [_spreads(losses) for losses in by_kind]
    structure = Structure(
        weight=round(float(weights.mean()), 2),
        spread=round(float(weights.std(ddof=1)), 2),
        distance=round(power, 2),
        pairs=round(float((y - power * x).std()), 2),
        neighbours=round(float(np.std(ratios) / np.sqrt(np.mean(evenness))), 2),
        sequences=(spreads[0][0], spreads[1][0]),
        idiosyncratic=(spreads[0][1], spreads[1][1]),
        ceiling=round(float(max(losses.max() for losses in by_kind)), 1),
    )
    real_logs = np.log([loss for _, loss in real])
    sums = np.log([sum(predicted(pattern, costs)) for pattern, _ in real])
    quality = {
        "real over predicted, geometric mean": float(np.exp(np.mean(ratios))),
        "correlation of logarithms": float(np.corrcoef(real_logs, sums)[0, 1]),
    }
    return structure, quality


def _spreads(losses: NDArray[np.float64]) -> tuple[float, float]:
    """Return the standard deviations of the logarithms by sequence, and of the rest, for segments with a cost."""
    means = losses.mean(axis=1)
    logs = np.log(np.maximum(losses[(means > 0.01 * means.max()) & (means < 0.5 * means.max())], SMALLEST))
    centred = logs - logs.mean(axis=1, keepdims=True)
    sequence = centred.mean(axis=0)
    return round(float(sequence.std(ddof=1)), 2), round(float((centred - sequence).std()), 2)


def _level(values: NDArray[np.float64], layer: NDArray[np.int64]) -> NDArray[np.float64]:
    """Average `values` over the entries of the same layer."""
    means = np.bincount(layer, values) / np.maximum(np.bincount(layer), 1)
    return np.asarray(means[layer])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo.MODEL))
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--each", type=int, default=20, help="random patterns at each retention")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("fit_simulator.json"))
    options = parser.parse_args()
    set_quiet()
    engine = TransformersEngine.load(options.model, options.device, batch_size=options.batch_size)
    data, _ = demo_sets(options.model, options.seq_len, calibration=options.sequences, held_out=6)
    alone = segments(engine.model.num_layers)
    chosen = random_patterns(engine.model.num_layers, options.each)
    found = evaluate(engine, [*alone.values(), *chosen], data)
    costs = {key: estimates.loss(found[pattern], data).mean for key, pattern in alone.items()}
    a_token = np.asarray([np.divide(found[item].losses, found[item].tokens) for item in alone.values()], np.float64)
    by_kind = [a_token[:, data.source_of == kind] for kind in (0, 1)]
    real = [(pattern, estimates.loss(found[pattern], data).mean) for pattern in chosen]
    structure, quality = fit(costs, real, by_kind)
    print(structure)
    for name, value in quality.items():
        print(f"{name}: {value:.3f}")
    kept = {pattern.roles: evaluation.losses for pattern, evaluation in found.items()}
    options.output.write_text(json.dumps({"structure": str(structure), "quality": quality, "losses": kept}) + "\n")


def evaluate(engine: TransformersEngine, patterns: list[Pattern], data: TokenSet) -> dict[Pattern, Evaluation]:
    chosen = {pattern.key: pattern for pattern in patterns}
    return {chosen[item.pattern.key]: item for item in engine.evaluate(list(chosen.values()), data, "kl")}


if __name__ == "__main__":
    main()
