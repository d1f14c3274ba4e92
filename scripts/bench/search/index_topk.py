"""The loss of a model whose queries select more or fewer tokens than it was trained with, under one pattern.

    python -m scripts.bench.search.index_topk
    python -m scripts.bench.search.index_topk --seq-len 1024 --patterns FILE@1/4,...

`index_topk` is a value of config.json, so nothing is trained again. All sizes are scored on the same tokens, those
behind twice the model's own size. Loss and the increase over the model's own size with all F, paired by sequence; text
likewise; of the recall tasks the share of answers that greedy decoding would get right. ± over sequences.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_kernels.patching import replaced
from indexcache_search import demo
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.hf.loading import set_quiet
from scripts.bench.search.sets import demo_sets
from sglang_indexcache import Pattern
from sglang_indexcache.pattern_file.pattern_name import PatternSpec

Values = NDArray[np.float64]


def behind(data: TokenSet, position: int) -> TokenSet:
    """Return the same sequences, in which tokens up to `position` don't count."""
    return replace(data, scored=data.scored & (np.arange(data.seq_len) > position))


def selecting(engine: TransformersEngine, pattern: Pattern, topk: int, data: TokenSet) -> Evaluation:
    """Evaluate a pattern of a model whose queries select `topk` tokens."""
    modules = [module for name, module in engine.torch_model.named_modules() if name.endswith(".indexer")]
    with replaced(*((module, "index_topk", topk) for module in modules)):
        [found] = engine.evaluate([pattern], data, "nll", fresh=True)  # states that are kept are of another size
    return found


def shown(values: Values, sign: str = "+") -> str:
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():{sign}.4f} ±{error:.4f}"


def row(found: Evaluation, base: Evaluation, data: TokenSet) -> list[str]:
    """Return the cells of a table: loss, increase, increase on text, and the accuracy of each recall task."""
    tokens = np.asarray(found.tokens)
    losses, more = (np.asarray(item.losses) / tokens for item in (found, base))
    correct = np.asarray(found.correct) / tokens
    of: Mapping[str, Any] = {name: data.source_of == number for number, name in enumerate(data.sources)}
    text = of[demo.EVALUATION[0]]
    cells = [f"{losses.mean():.4f}", shown(losses - more), shown((losses - more)[text])]
    return cells + [shown(correct[of[name]], "") for name in demo.EVALUATION[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", default="0.5,1,2", help="of the model's own index_topk")
    parser.add_argument("--patterns", default=f"{demo.PATTERNS[0]}@1/4", help="besides all F")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    set_quiet()
    engine = TransformersEngine.load(str(demo.MODEL), options.device, "float32", 1, 0)
    model = engine.model
    _, data = demo_sets(str(demo.MODEL), options.seq_len, calibration=2, held_out=options.sequences)
    data = behind(data, 2 * model.index_topk)
    named = {"all F": model.native}
    for text in options.patterns.split(","):
        named[text.rpartition("/patterns/")[2]] = PatternSpec.read(text).unchecked(model.native)
    base = selecting(engine, model.native, model.index_topk, data)
    print(
        f"{data.num_sequences} sequences of {data.seq_len} tokens, {data.scored_tokens} scored; {options.device}, ",
        end="",
    )
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers")) + "\n")
    tasks = [name.removeprefix("demo:") for name in demo.EVALUATION[1:]]
    print("| pattern | index_topk | loss | increase | text | " + " | ".join(tasks) + " |")
    print("| -- |" + " -: |" * (4 + len(tasks)))
    for name, pattern in named.items():
        for factor in map(float, options.factors.split(",")):
            topk = round(factor * model.index_topk)
            own = pattern == model.native and topk == model.index_topk
            found = base if own else selecting(engine, pattern, topk, data)
            print(f"| {name} | {topk} | " + " | ".join(row(found, base, data)) + " |", flush=True)


if __name__ == "__main__":
    main()
