"""The loss from a selection that leaves out some of the highest scores: the demo model, every layer F.

    python -m scripts.bench.search.inexact_selection

A query should attend to the 64 tokens that score highest; here some of them are left out at random, and the next best
replace them: anywhere among the 64, or in their last quarter, where a selection that sorts into coarse bins fails.
Increase of the loss over the exact selection, held-out text and recall, ± over sequences, paired.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indexcache_kernels.patching import replaced
from indexcache_search import demo
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.hf.loading import set_quiet
from scripts.bench.search.sets import demo_sets


class Inexact:
    """The forward of an indexer of transformers, which leaves out `missing` of the best, behind the first `kept`."""

    def __init__(self, indexer: Any, kept: int, missing: int) -> None:
        self._indexer, self._run, self._kept, self._missing = indexer, indexer.forward, kept, missing
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def __call__(self, *given: Any, **named: Any) -> Tensor:
        count = self._indexer.index_topk
        with replaced((self._indexer, "index_topk", count + self._missing)):
            best: Tensor = self._run(*given, **named)  # [batch, queries, count + missing], the best first
        drawn = torch.rand(*best.shape[:2], count - self._kept, generator=self._generator)
        left_out = self._kept + drawn.argsort(-1)[..., : self._missing]
        left_out[:, :count] = count + torch.arange(self._missing)  # these queries attend to all that they see
        taken = torch.ones(best.shape, dtype=torch.bool).scatter_(-1, left_out, False)
        return best[taken].view(*best.shape[:2], count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", default="1,3,6,16", help="of 64")
    parser.add_argument("--sequences", type=int, default=48)
    options = parser.parse_args()
    set_quiet()
    name = str(demo.MODEL)
    _, data = demo_sets(name, 512, calibration=24, held_out=options.sequences, sources=demo.EVALUATION)
    engine = TransformersEngine.load(name, "cpu", "float32", 1, 0, attention="naive")
    indexers = [module for key, module in engine.torch_model.named_modules() if key.endswith(".indexer")]

    def losses(kept: int, missing: int) -> NDArray[np.float64]:
        changed = [(module, "forward", Inexact(module, kept, missing)) for module in indexers] if missing else []
        with replaced(*changed):
            [found] = engine.evaluate([engine.model.native], data, "nll")
        return np.divide(found.losses, found.tokens, dtype=np.float64)

    exact, topk = losses(0, 0), indexers[0].index_topk
    print(
        f"exact: {exact.mean():.4f}, {len(exact)} sequences\n\n| left out | of all {topk} | of the last {topk // 4} |"
    )
    print("|---|---:|---:|")
    for missing in map(int, options.missing.split(",")):
        cells = []
        for kept in (0, topk - topk // 4):
            more = losses(kept, missing) - exact
            cells.append(f"{more.mean():+.4f} ±{more.std(ddof=1) / len(more) ** 0.5:.4f}")
        print(f"| {missing} ({missing / topk:.1%}) | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
