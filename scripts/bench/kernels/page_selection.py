"""Times of the kernels of a layer that selects pages, beside its decode attention, on one CUDA device.

    python -m scripts.bench.kernels.page_selection --shapes 7b,8b --cells 1x32768,16x16384,64x32768

Tables list tokens, as flashinfer's do in SGLang (pages of 16 tokens, in shuffled order), keys are bfloat16 and random.
Yardsticks, where they are installed: flashinfer's decode attention of the same layer, and SGLang's
`minimax_decode_topk_page_table`, which takes the pages with the highest scores of a table with a row for each request.
`compressed_scores` and `update_means` are what F layers run in the place of `page_scores`: means of 16 keys; or
`rounded_scores` and `round_keys`: keys in 4 bits.
`chosen` is flashinfer's attention over what was selected, as layers that share run it, split along the keys and whole.
Time: median of replays of a CUDA graph with ten calls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from indexcache_dense.kernels import (
    CachedPages,
    PageBudget,
    RoundedKeys,
    compressed_scores,
    page_scores,
    round_keys,
    rounded_scores,
    select_pages,
    update_means,
)
from scripts.bench.shapes import SHAPES, parse_cells
from scripts.bench.timing import graph_ms

DIM = 128


class Layer:
    """One layer's cache and queries."""

    def __init__(self, heads: int, kv_heads: int, batch: int, length: int) -> None:
        generator = torch.Generator("cuda").manual_seed(length + batch)
        slots = batch * length
        self.q = torch.randn(batch, heads, DIM, device="cuda", generator=generator).bfloat16()
        self.k, self.v = (torch.empty(slots, kv_heads, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.k.normal_(generator=generator)
        self.v.normal_(generator=generator)
        pages = torch.randperm(slots // 16, device="cuda", generator=generator)
        self.table = (pages[:, None] * 16 + torch.arange(16, device="cuda")).flatten().int()
        self.starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
        self.lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        self.pages = CachedPages(self.table, self.lengths, starts=self.starts[:-1])
        self.lse = torch.full((batch, heads), 10.0, device="cuda")
        self.compressed = torch.empty(slots // 16, kv_heads, DIM, device="cuda", dtype=torch.bfloat16)
        self.rounded = RoundedKeys.allocate(self.k)
        self.scores = torch.empty(batch, -(-length // 16), device="cuda")

    def page_scores(self, budget: PageBudget) -> Tensor:
        given = self.q, self.k, self.pages
        return page_scores(*given, lse=self.lse, scale=DIM**-0.5, budget=budget, out=self.scores)

    def means(self, newest: bool) -> Tensor:
        update_means(self.k, self.compressed, self.pages, newest=newest)
        return self.compressed

    def compressed_scores(self, budget: PageBudget) -> Tensor:
        given = self.q, self.compressed, self.pages
        return compressed_scores(*given, scale=DIM**-0.5, budget=budget, out=self.scores)

    def round_keys(self, newest: bool) -> None:
        round_keys(self.k, self.rounded, self.pages, newest=newest)

    def rounded_scores(self, budget: PageBudget) -> Tensor:
        given = self.q, self.rounded, self.pages
        return rounded_scores(*given, scale=DIM**-0.5, budget=budget, out=self.scores)

    def select_pages(self, budget: PageBudget, tokens: Tensor, starts: Tensor, kept: Tensor) -> None:
        out: dict[str, Any] = {"out_table": tokens, "out_starts": starts, "out_lengths": kept}
        select_pages(self.scores, self.pages, budget=budget, **out)


def flashinfer_attention(layer: Layer, tokens: int | None = None, split: bool = True) -> Callable[[], Any]:
    """Plan flashinfer's decode attention as SGLang does, over the first `tokens` of each request's list."""
    import flashinfer

    batch, heads, _ = layer.q.shape
    starts, table = layer.starts, layer.table
    if tokens is not None:
        table = layer.table.view(batch, -1)[:, :tokens].flatten()
        starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * tokens
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    last = torch.ones(batch, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=heads // layer.k.shape[1] >= 4,
        paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=table,
        paged_kv_last_page_len_buffer=last,
    )
    sizes = heads, layer.k.shape[1], DIM, 1
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(starts, table, last, *sizes, **dtypes, disable_split_kv=not split)
    cache = layer.k[:, None], layer.v[:, None]
    return lambda: wrapper.run(layer.q, cache)


def minimax_topk(layer: Layer, pages: int) -> Callable[[], Any]:
    """Return SGLang's top-k of pages; it takes up to 64."""
    from sglang.kernels.ops.attention.minimax_decode_topk import minimax_decode_topk_page_table

    rows = layer.table.view(len(layer.q), -1)
    slots = torch.arange(len(rows), device="cuda")
    return lambda: minimax_decode_topk_page_table(layer.scores[None], layer.lengths, rows, slots, 16, pages, 1)


def measure(heads: int, kv_heads: int, batch: int, length: int, pages: int) -> dict[str, float | str]:
    """Return the milliseconds of each implementation, or its error."""
    layer, budget = Layer(heads, kv_heads, batch, length), PageBudget(16, pages, max(1, pages // 8))
    tokens = torch.zeros(batch * pages * 16, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch, device="cuda", dtype=torch.int32) * pages * 16
    kept = torch.zeros(batch, dtype=torch.int32, device="cuda")
    layer.means(newest=False)
    layer.round_keys(newest=False)
    layer.page_scores(budget)
    found: dict[str, float | str] = {
        "compressed_scores": graph_ms(lambda: layer.compressed_scores(budget)),
        "update_means, newest": graph_ms(lambda: layer.means(newest=True)),
        "update_means, all": graph_ms(lambda: layer.means(newest=False)),
        "rounded_scores": graph_ms(lambda: layer.rounded_scores(budget)),
        "round_keys, newest": graph_ms(lambda: layer.round_keys(newest=True)),
        "round_keys, all": graph_ms(lambda: layer.round_keys(newest=False)),
        "page_scores": graph_ms(lambda: layer.page_scores(budget)),
        "select_pages": graph_ms(lambda: layer.select_pages(budget, tokens, starts, kept)),
    }
    for name, make in (
        ("flashinfer attention", lambda: flashinfer_attention(layer)),
        ("chosen, split", lambda: flashinfer_attention(layer, pages * 16)),
        ("chosen, whole", lambda: flashinfer_attention(layer, pages * 16, split=False)),
        ("minimax_decode_topk_page_table", lambda: minimax_topk(layer, pages)),
    ):
        try:
            found[name] = graph_ms(make())
        except Exception as error:  # not installed, or not for these sizes
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="7b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--cells", default="1x32768,16x16384,64x32768", help="requests x tokens in the cache")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("bench_page_selection.json"))
    options = parser.parse_args()
    results = []
    for shape in options.shapes.split(","):
        heads, kv_heads = SHAPES[shape]["sizes"][3:]
        for batch, length in parse_cells(options.cells):
            found = measure(heads, kv_heads, batch, length, options.pages)
            results.append({"shape": shape, "batch": batch, "length": length, **found})
            shown = (
                f"{name} {value if isinstance(value, str) else format(value, '.4f')}" for name, value in found.items()
            )
            gigabytes = batch * length * kv_heads * DIM * 2 / 1e9
            rate = gigabytes / found["page_scores"]
            print(f"{shape} {batch} x {length}, ms: {', '.join(shown)}; page_scores reads {rate:.2f} TB/s", flush=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
