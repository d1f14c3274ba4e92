"""Memory of the float32 logits that indexers make while they read a prompt: computed, and measured on one GPU.

    python -m scripts.bench.kernels.logits_memory
    python -m scripts.bench.kernels.logits_memory --measure --output logits_memory.json

An indexer of a DSA model scores the rows of a chunk against all keys so far, `[rows, keys]` in float32, for one layer
at a time. No pool that `--mem-fraction-static` sizes has room for it. Where it would take more than a budget, SGLang
goes by parts of the rows, and a part is freed only after the next one was allocated. Read:
`layers/attention/mqa_logits_utils.py` and `Indexer._get_topk_ragged` of 0.5.23. Layers that select in blocks score a
row for each block and for the last 128 queries; ranks that share out rows score theirs.

The table is of the last chunk of a prompt. `--measure` runs DeepGEMM and fast_topk_v2 on such rows as SGLang does, adds
the peak of PyTorch's allocator above inputs and selections, and ends with 1 where it is more than 2 % off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch

from sglang_indexcache.families.dsa.blocks.selection import scored_rows

TOPK, DIM = 2048, 128
GIB = 2**30
FREE_FRACTION = 0.2  # SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION
TOTAL_FRACTION = 0.3
SMALL = 8_000_000  # elements that are never split
ALIGN = 256  # columns of float32 to which DeepGEMM rounds up a row
H200_GIB = 139.8  # that CUDA reports
AGREES = 0.02


@dataclass(frozen=True)
class Variant:
    """How the rows of a chunk are scored: in blocks, shared out by ranks, or each by itself.

    Attributes:
        queries: of a block; 1 without blocks.
        ranks: that share out the rows; 1 if they don't.
    """

    queries: int = 1
    ranks: int = 1

    @property
    def name(self) -> str:
        blocks = "stock" if self.queries == 1 else f"q{self.queries}"
        return blocks if self.ranks == 1 else f"{blocks}, shared out over {self.ranks}"

    def rows(self, prefix: int, rows: int, topk: int = TOPK) -> int:
        """Return the rows that one rank scores of a chunk of `rows` queries with `prefix` tokens before it."""
        return scored_rows(prefix, rows, topk, self.queries, self.ranks)


VARIANTS = (
    *(Variant(), Variant(ranks=2), Variant(ranks=8)),
    *(Variant(4), Variant(16), Variant(64), Variant(4, ranks=8)),
)


def budget_bytes(total: int, free: int, static: float) -> int:
    """Return the bytes that SGLang allows for logits at once.

    Args:
        total: memory of the device.
        free: what of it is free when the first long prompt comes; SGLang asks once.
        static: `--mem-fraction-static`.
    """
    configured = min(int(int(total * max(0.0, 1 - static)) * FREE_FRACTION), int(total * TOTAL_FRACTION))
    return max(1, min(configured, int(free * FREE_FRACTION)))


def parts_of(rows: int, keys: int, budget: int) -> list[int]:
    """Return the rows of each part in which SGLang scores `rows` rows against `keys` keys."""
    if rows * keys < SMALL or rows * keys * 4 <= budget:
        return [rows]
    most = min(rows, max(1, budget // (4 * keys)))
    return [min(most, rows - first) for first in range(0, rows, most)]


def peak_bytes(parts: Sequence[int], keys: int) -> int:
    """Return the most bytes of logits that exist at once: of a part, and of the one before."""
    row = 4 * -(-keys // ALIGN) * ALIGN
    return row * max(parts[0], *(before + after for before, after in pairwise(parts)), 0)


@dataclass(frozen=True)
class Case:
    """The last chunk of a prompt: rows that are scored, at once and in parts, and bytes of logits."""

    keys: int
    variant: str
    rows: int
    whole_bytes: int
    parts: int
    peak_bytes: int
    measured_bytes: int | None = None

    def line(self) -> str:
        """Return the row of a table."""
        measured = "" if self.measured_bytes is None else f" {self.measured_bytes / GIB:.2f} |"
        sizes = f"{self.whole_bytes / GIB:.2f} | {self.parts} | {self.peak_bytes / GIB:.2f}"
        return f"| {self.keys:,} | {self.variant} | {self.rows:,} | {sizes} |{measured}"


def cases(lengths: Sequence[int], chunk: int, budget: int, heads: int | None = None) -> Iterator[Case]:
    """Yield all variants of each prompt; with a number of index heads, they are measured."""
    for length in lengths:
        for variant in VARIANTS:
            rows = variant.rows(length - min(chunk, length), min(chunk, length))
            parts = parts_of(rows, length, budget)
            found = None if heads is None else measure(parts, length, heads)
            whole, most = peak_bytes([rows], length), peak_bytes(parts, length)
            yield Case(length, variant.name, rows, whole, len(parts), most, found)


def measure(parts: Sequence[int], keys: int, heads: int) -> int:
    """Return the peak in bytes above inputs and selections, scored and selected in `parts` as SGLang does."""
    import deep_gemm
    import sgl_kernel

    rows = sum(parts)
    q = torch.randn(rows, heads, DIM, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(keys, DIM, device="cuda").to(torch.float8_e4m3fn), torch.ones(keys, device="cuda")
    weights = torch.randn(rows, heads, device="cuda")
    ends = torch.linspace(keys - rows + 1, keys, rows, device="cuda").int()
    starts = torch.zeros_like(ends)
    chosen = torch.empty(rows, TOPK, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, first = torch.cuda.memory_allocated(), 0
    for count in parts:
        part = slice(first, first + count)
        logits = deep_gemm.fp8_mqa_logits(q[part], k, weights[part], starts[part], ends[part], clean_logits=False)
        chosen[part] = sgl_kernel.fast_topk_v2(logits, ends[part], TOPK, row_starts=starts[part])
        first += count
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def differing(found: Sequence[Case]) -> list[str]:
    """Return a line for each case whose measured bytes are not the computed ones, selections of a part aside."""
    lines = []
    for case in found:
        assert case.measured_bytes is not None
        least, most = case.peak_bytes * (1 - AGREES), case.peak_bytes * (1 + AGREES) + 4 * TOPK * case.rows
        if not least <= case.measured_bytes <= most:
            lines.append(f"{case.keys} keys, {case.variant}: {case.measured_bytes} bytes, computed {case.peak_bytes}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if what was measured is not what was computed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="131072,204800", help="tokens of prompts")
    parser.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size")
    parser.add_argument("--static", type=float, default=0.85, help="--mem-fraction-static")
    parser.add_argument("--total", type=float, default=H200_GIB, help="GiB of the device; measured: its own")
    parser.add_argument("--free", type=float, help="GiB that are free beside the pools; by default all")
    parser.add_argument("--heads", type=int, default=64, help="of the indexer; 32 for GLM-5")
    parser.add_argument("--measure", action="store_true", help="on a Hopper or Blackwell GPU")
    parser.add_argument("--output", type=Path, help="JSON with device and versions")
    options = parser.parse_args(arguments)
    total = torch.cuda.get_device_properties(0).total_memory if options.measure else int(options.total * GIB)
    free = total if options.free is None else int(options.free * GIB)
    budget = budget_bytes(total, free, options.static)
    print(f"budget of SGLang: {budget / GIB:.2f} GiB at once, of {total / GIB:.1f}\n")
    print(
        "| keys | rows of | rows | GiB at once | parts | GiB, two parts |" + (" measured |" if options.measure else "")
    )
    print("| -: | -- | -: | -: | -: | -: |" + (" -: |" if options.measure else ""))
    found = []
    lengths = [int(length) for length in options.lengths.split(",")]
    for case in cases(lengths, options.chunk, budget, options.heads if options.measure else None):
        found.append(case)
        print(case.line(), flush=True)
    if options.output is not None:
        content = {
            "device": torch.cuda.get_device_name() if options.measure else None,
            "budget_bytes": budget,
            "versions": {"torch": version("torch")},
            "options": {**vars(options), "output": str(options.output)},
            "cases": [asdict(case) for case in found],
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    lines = differing(found) if options.measure else []
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
