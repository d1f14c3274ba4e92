"""Which of the highest scores does SGLang's selection, fast_topk_v2, leave out? Needs sgl_kernel and a CUDA device.

    python -m scripts.fast_topk_exactness

Rows of scores of several kinds, a prompt's last queries and decoded tokens apart. The cut is the lowest of the 2,048
highest scores of a row; left out are as many as were selected below it, or not at all: which of equal scores are taken
does not count. `above` says how far the highest of those left out is above the cut, relative to it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from scripts.deep_gemm_topk import TOPK


def rising(noise: Tensor) -> Tensor:
    """Scores that grow along a row, the same in all."""
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
    """What a selection misses.

    Args:
        scores: `[rows, L]`, float32.
        lengths: `[rows]`, how many of a row count, more than K each.
        chosen: `[rows, K]`, the places that were selected, -1 for none.

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--rows", type=int, default=256, help="of a prompt; while decoding 8")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    import sgl_kernel

    print(f"{torch.cuda.get_device_name()}, {options.length} scores a row, {options.seeds} seeds\n")
    print("| scores | rows | left out, most of a row | mean | above the cut, most |\n|---|---:|---:|---:|---:|")
    for name, kind in KINDS.items():
        for rows in (options.rows, 8):
            counts, distances = [], []
            for seed in range(options.seeds):
                generator = torch.Generator("cuda").manual_seed(seed)
                scores = kind(torch.randn(rows, options.length, device="cuda", generator=generator))
                lengths = torch.arange(options.length - rows + 1, options.length + 1, device="cuda", dtype=torch.int32)
                starts = {} if rows == 8 else {"row_starts": torch.zeros_like(lengths)}
                count, above = left_out(scores, lengths, sgl_kernel.fast_topk_v2(scores, lengths, TOPK, **starts))
                counts.append(count)
                distances.append(above)
            count, above = torch.cat(counts), torch.cat(distances)
            print(f"| {name} | {rows} | {count.max()} | {count.float().mean():.1f} | {above.max():.2%} |", flush=True)


if __name__ == "__main__":
    main()
