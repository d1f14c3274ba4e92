"""The highest scores that SGLang's selection, fast_topk_v2, leaves out, and the times of exact ones.

    python -m scripts.bench.kernels.fast_topk_exactness
    python -m scripts.bench.kernels.fast_topk_exactness --topk 8192

Needs sgl_kernel and a CUDA device; FlashInfer's top-k stands beside it where it is installed, as SGLang calls it
(`--dsa-topk-backend flashinfer`), and as FlashInfer chooses itself. Rows of scores of several kinds: a prompt's last
queries, and decoded tokens (8 and 64 rows). The cut is the lowest of the highest scores of a row; left out are as many
as were selected below it, or not at all: which of equal scores are taken does not count. `above` says how far the
highest of those left out is above the cut, relative to it. Times are medians of ten calls in a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from scripts.bench.kernels.deep_gemm_topk import TOPK, fast_topk, flashinfer_topk
from scripts.bench.kernels.operations import installed
from scripts.bench.timing import median_ms

DECODED = 64  # rows up to which they are decoded tokens
Select = Callable[[Tensor, Tensor, int], Tensor]  # scores, lengths, k -> [rows, k]


def rising(noise: Tensor) -> Tensor:
    """Make scores that grow along a row, the same in all."""
    return torch.linspace(1, 2, noise.shape[1], device=noise.device).repeat(len(noise), 1)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda noise: noise,
    "correlated": lambda noise: noise.cumsum(1) / noise.shape[1] ** 0.5 + 0.1 * noise,
    "rising": rising,
    "falling": lambda noise: rising(noise).flip(1),
    "few values": lambda noise: (noise * 2).round(),
    "all equal": torch.ones_like,
}


def left_out(scores: Tensor, lengths: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Compare a selection with the highest scores.

    Args:
        scores: `[rows, L]`, float32.
        lengths: `[rows]`, how many of a row count, more than K each.
        chosen: `[rows, K]`, the positions that were selected, -1 for none.

    Returns:
        `[rows]` each: how many of K were left out, and how far the highest of them is above the cut.
    """
    there = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    scores = scores.masked_fill(~there, -torch.inf)
    cut = scores.topk(chosen.shape[1], dim=1).values[:, -1:]
    taken = torch.zeros((len(scores), scores.shape[1] + 1), dtype=torch.bool, device=scores.device)
    taken.scatter_(1, chosen.long() % (scores.shape[1] + 1), True)  # -1 becomes the last column
    taken = taken[:, :-1]
    above = ((scores - cut) / cut.abs()).masked_fill(taken | (scores <= cut), 0.0)
    return chosen.shape[1] - (taken & (scores >= cut)).sum(1), above.amax(1)


def selections(topk: int) -> dict[str, Select]:
    """Return the selections that are installed here."""
    found: dict[str, Select] = {}
    if topk == TOPK:
        found["fast_topk_v2"] = lambda scores, lengths, count: fast_topk(
            scores, lengths, None if len(scores) <= DECODED else torch.zeros_like(lengths)
        )
    if installed("flashinfer"):
        for name, safe in (("FlashInfer, as SGLang calls it", True), ("FlashInfer", False)):
            found[name] = partial(by_flashinfer, graph_safe=safe)
    found["torch.topk"] = lambda scores, lengths, count: scores.topk(count, dim=1, sorted=False).indices.int()
    return found


def by_flashinfer(scores: Tensor, lengths: Tensor, count: int, *, graph_safe: bool) -> Tensor:
    return flashinfer_topk(scores, lengths, topk=count, graph_safe=graph_safe)


def ten_times(select: Select, scores: Tensor, lengths: Tensor, count: int) -> None:
    for _ in range(10):
        select(scores, lengths, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--topk", type=int, default=TOPK)
    parser.add_argument("--rows", default="8,64,1024", help="up to 64 are decoded tokens, more a prompt's last queries")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {options.topk} of {options.length} scores a row, {options.seeds} seeds\n")
    print("| scores | rows | selection | left out, most of a row | mean | above the cut, most | us |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for name, kind in KINDS.items():
        for rows in map(int, options.rows.split(",")):
            for selection, select in selections(options.topk).items():
                counts, distances, taken = [], [], 0.0
                for seed in range(options.seeds):
                    generator = torch.Generator("cuda").manual_seed(seed)
                    scores = kind(torch.randn(rows, options.length, device="cuda", generator=generator))
                    ends = torch.arange(options.length - rows + 1, options.length + 1, device="cuda", dtype=torch.int32)
                    lengths = ends if rows > DECODED else torch.full_like(ends, options.length)
                    if selection == "torch.topk":  # knows of no lengths
                        lengths = torch.full_like(lengths, options.length)
                    count, above = left_out(scores, lengths, select(scores, lengths, options.topk))
                    counts.append(count)
                    distances.append(above)
                    if not seed:
                        taken = 100 * median_ms(partial(ten_times, select, scores, lengths, options.topk), 5)
                count, above = torch.cat(counts), torch.cat(distances)
                print(
                    f"| {name} | {rows} | {selection} | {count.max()} | {count.float().mean():.1f} | {above.max():.2%}"
                    f" | {taken:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
