"""Times of block_scores and block_attention on a CUDA device.

    python -m scripts.bench.kernels.blocks

Decoding: one layer of `--batch` requests of 64K tokens, 64 of 1,024 blocks of 64 tokens each, in CUDA graphs; beside
FlashInfer's attention to the same blocks (its pages have 64 tokens, too) and to everything. Training: SmolLM2's heads,
8,192 tokens, 32 of 128 blocks of every query with a bias, forward and backward; beside PyTorch's fused attention to
everything. The share of the roofline is that of `operations`: what must be read and computed once, over the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from indexcache_lab.kernels import block_attention, block_scores, compress_keys
from scripts.bench.kernels.operations import BANDWIDTHS, RATES, installed, size
from scripts.bench.timing import captured, median_ms

SHAPES = {"MiniCPM4-8B": (32, 2, 128), "Qwen2.5-7B": (28, 4, 128), "Qwen3-8B": (32, 8, 128)}  # H, G, D
SMOLLM2 = (9, 3, 64)
BLOCK = 64

Row = tuple[str, Callable[[], Any], float, float]  # name, call, operations, bytes


def chosen_blocks(rows: int, count: int, blocks: int) -> Tensor:
    """Draw different blocks for each row, ascending: `[rows, count]`, int32."""
    return torch.rand(rows, blocks, device="cuda").argsort(1)[:, :count].int().sort(1).values


def flashinfer_decode(tables: list[Tensor], cache: Tensor, q: Tensor) -> Callable[[], Any]:
    """Plan attention to the pages of each request's table; `cache` is `[2, pages, BLOCK, G, D]`."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    starts = torch.tensor([0, *(len(table) for table in tables)], dtype=torch.int32).cumsum(0).int()
    last = torch.full((len(tables),), BLOCK, dtype=torch.int32)
    heads, groups, dim = q.shape[1], cache.shape[3], q.shape[2]
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(starts.cuda(), torch.cat(tables).int(), last.cuda(), heads, groups, dim, BLOCK, **types)
    return partial(wrapper.run, q, (cache[0], cache[1]))


def decoding(shape: str, batch: int, context: int, count: int) -> Iterator[Row]:
    heads, groups, dim = SHAPES[shape]
    q = torch.randn(batch, heads, dim, device="cuda").bfloat16()
    k, v = torch.randn(2, batch, groups, context, dim, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    compressed, blocks = compress_keys(k), chosen_blocks(batch, count, context // BLOCK)
    given: dict[str, Any] = {"scale": dim**-0.5, "block_tokens": BLOCK}
    operations = 2.0 * batch * heads * dim * compressed.shape[2]
    yield "block_scores", captured(partial(block_scores, q, compressed, lengths, **given)), operations, size(compressed)
    tokens = batch * count * BLOCK
    operations, read = 4.0 * tokens * heads * dim, 4.0 * tokens * groups * dim
    replay = captured(partial(block_attention, q, k, v, blocks, lengths=lengths, **given))
    yield "block_attention", replay, operations, read
    del k, v
    if installed("flashinfer"):
        cache = torch.randn(2, batch * context // BLOCK, BLOCK, groups, dim, device="cuda", dtype=torch.bfloat16)
        first = torch.arange(batch, device="cuda")[:, None] * (context // BLOCK)
        some, everything = list(first + blocks), list(first + torch.arange(context // BLOCK, device="cuda"))
        yield "FlashInfer, the same blocks", captured(flashinfer_decode(some, cache, q)), operations, read
        share = context / (count * BLOCK)
        replay = captured(flashinfer_decode(everything, cache, q))
        yield "FlashInfer, everything", replay, operations * share, read * share


def training(tokens: int, count: int) -> Iterator[Row]:
    heads, groups, dim = SMOLLM2
    q = torch.randn(1, tokens, heads, dim, device="cuda").bfloat16().requires_grad_()
    k, v = (torch.randn(1, groups, tokens, dim, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    bias = torch.randn(1, groups, tokens, device="cuda").requires_grad_()
    position = torch.arange(tokens, device="cuda")
    blocks = chosen_blocks(tokens, count, tokens // BLOCK)
    blocks = torch.where(blocks <= position[:, None] // BLOCK, blocks, -1)[None]
    lengths = (position + 1).int()[None]
    seen = float(((lengths[..., None] - blocks * BLOCK).clamp(0, BLOCK) * (blocks >= 0)).sum())  # pairs, by head
    forward = partial(block_attention, q, k, v, blocks, scale=dim**-0.5, block_tokens=BLOCK, lengths=lengths, bias=bias)
    out = forward()
    above = torch.randn_like(out)
    yield "block_attention", forward, 4 * seen * heads * dim, size(q, k, v, bias)
    backward = partial(torch.autograd.grad, out, (q, k, v, bias), above, retain_graph=True)
    yield "its backward", backward, 10 * seen * heads * dim, 2 * size(q, k, v, bias)
    rows = q.detach().transpose(1, 2).requires_grad_()
    fused = partial(F.scaled_dot_product_attention, rows, k, v, is_causal=True, enable_gqa=True)
    out = fused()
    pairs = tokens * (tokens + 1) / 2
    yield "PyTorch, everything", fused, 4 * pairs * heads * dim, size(q, k, v)
    backward = partial(torch.autograd.grad, out, (rows, k, v), above.transpose(1, 2), retain_graph=True)
    yield "its backward", backward, 10 * pairs * heads * dim, 2 * size(q, k, v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="8,64")
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    device = torch.cuda.get_device_name()
    bandwidth = next((rate for name, rate in BANDWIDTHS.items() if name in device), float("inf"))
    print(f"{device}, torch {torch.__version__}\n\n| shape | call | ms | of the roofline |\n|---|---|---:|---:|")
    cases = [
        (f"{shape}, {batch} requests", decoding(shape, int(batch), options.context, options.pages))
        for shape in SHAPES
        for batch in options.batch.split(",")
    ]
    for name, rows in [*cases, ("SmolLM2-135M, 8,192 tokens", training(8192, 32))]:
        for call_name, call, operations, read in rows:
            time_ms = median_ms(call, options.repeats)
            floor = 1e3 * max(operations / RATES[torch.bfloat16], read / bandwidth)
            print(f"| {name} | {call_name} | {time_ms:.3f} | {floor / time_ms:.0%} |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
