"""Times of attention of blocks of queries together, beside FlashMLA for each query. Needs SGLang's kernels and a GPU.

    python -m scripts.bench.kernels.grouped_attention

One layer, one chunk of prompt queries, absorbed MLA in bfloat16. Milliseconds are medians; errors are of the whole
result against float64, on some of the blocks. The other steps of selecting in blocks are timed below.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch
from torch import Tensor
from triton.testing import do_bench

from indexcache_kernels.grouped_attention import grouped_attention, triton
from indexcache_kernels.prompt_blocks import IndexSpace, expand_blocks, lowest_last, mean_queries
from sglang_indexcache.families.dsa.blocks.grouped import FlashMLA, flash_mla_on

TOPK, DIM, V_DIM = 2048, 576, 512
SCALE = 1 / math.sqrt(256)
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="queries of a chunk")
    parser.add_argument("--context", type=int, default=131072, help="keys")
    options = parser.parse_args()
    attend = flash_mla_on(DEVICE)
    assert isinstance(attend, FlashMLA)
    kv = torch.randn(options.context, DIM, device=DEVICE, dtype=torch.bfloat16)
    for heads in (8, 16, 32):
        for queries in (4, 8, 16, 32):
            q = torch.randn(options.rows, heads, DIM, device=DEVICE, dtype=torch.bfloat16)
            table = selections(options.rows // queries, queries, options.context)
            out, alone = (torch.empty(options.rows, heads, V_DIM, device=DEVICE, dtype=q.dtype) for _ in range(2))
            run = partial(
                grouped_attention, q, kv, table, queries=queries, scale=SCALE, v_dim=V_DIM, out=out, attend=attend
            )
            run()
            padded = torch.nn.functional.pad(q, (0, 0, 0, 64 - heads))
            stock = partial(attend, padded, kv, table, SCALE, TOPK, V_DIM)
            alone.copy_(stock()[0][:, :heads])
            common, own = table[::queries], table[queries - 1 :: queries, -queries:]
            grouped = q.view(-1, queries * heads, DIM)
            shared, lse = attend(grouped, kv, common, SCALE, TOPK - queries, V_DIM)
            parts = (
                partial(attend, grouped, kv, common, SCALE, TOPK - queries, V_DIM),
                partial(triton.add_own, q, kv, own, shared, lse, SCALE, out),
            )
            times = [do_bench(call, return_mode="median") for call in (stock, run, *parts)]
            errors = [error(found, q, kv, table) for found in (alone, out)]
            print(
                f"{heads:2} heads, blocks of {queries:2}: alone {times[0]:.3f} ms, together {times[1]:.3f}"
                f" ({times[0] / times[1]:.2f}x; shared keys {times[2]:.3f}, own tokens {times[3]:.3f}),"
                f" errors {errors[0]:.2e} and {errors[1]:.2e}",
                flush=True,
            )
    steps(options.rows, options.context)


def selections(blocks: int, queries: int, context: int) -> Tensor:
    """Return a table of what queries attend to, `[blocks x queries, TOPK]`, int32."""
    best = torch.stack([torch.randperm(context, device=DEVICE)[:TOPK].int() for _ in range(blocks)])
    own = torch.randint(0, context - queries, (blocks, 1), device=DEVICE) + torch.arange(queries, device=DEVICE)
    table = best.repeat_interleave(queries, 0)
    seen = torch.ones(queries, queries, dtype=torch.bool, device=DEVICE).tril()
    table[:, -queries:] = torch.where(seen, own[:, None].int(), -1).flatten(0, 1)
    return table


def error(found: Tensor, q: Tensor, kv: Tensor, table: Tensor, rows: int = 64) -> float:
    """Return the relative distance from float64 over the first queries."""
    keys = kv[table[:rows].long().clamp_min(0)].double()
    scores = torch.einsum("thd,tkd->thk", q[:rows].double(), keys) * SCALE
    wanted = scores.masked_fill((table[:rows] < 0)[:, None], -math.inf).softmax(2) @ keys[..., :V_DIM]
    return float((found[:rows].double() - wanted).norm() / wanted.norm())


def steps(rows: int, context: int) -> None:
    """Time the other steps of selecting in blocks."""
    for queries in (4, 16):
        blocks = rows // queries
        q = torch.randn(rows, 32, 128, device=DEVICE).to(torch.float8_e4m3fn)
        gates = torch.rand(rows, 32, 1, device=DEVICE)
        first = torch.arange(0, rows, queries, device=DEVICE, dtype=torch.int32)
        sizes, starts = torch.full_like(first, queries), torch.zeros_like(first)
        scores = torch.randn(min(blocks, 2048), context, device=DEVICE)
        few = len(scores)
        chosen = torch.stack([torch.randperm(context, device=DEVICE)[:TOPK].int() for _ in range(blocks)])
        pages = torch.randperm(context // 64, device=DEVICE).int()[None]
        space = IndexSpace(pages=pages, requests=torch.zeros_like(first), page_size=64)
        result = torch.empty(rows, TOPK, dtype=torch.int32, device=DEVICE)
        calls = {
            "means": partial(mean_queries, q, gates, first, sizes),
            "lowest": partial(lowest_last, scores, chosen[:few], starts[:few], sizes[:few]),
            "expand": partial(expand_blocks, chosen, first, sizes, first, space, result),
        }
        times = {name: do_bench(call, return_mode="median") for name, call in calls.items()}
        print(f"blocks of {queries}, {blocks} of them: " + ", ".join(f"{k} {v:.3f} ms" for k, v in times.items()))


if __name__ == "__main__":
    main()
