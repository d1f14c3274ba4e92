"""Attention of one decode step on the CPU: all keys by PyTorch, and chosen blocks of 64 by the compiled kernel.

PyTorch's time is that of its fastest way: fused attention with shared key heads, or products of grouped heads. Medians
of calls that take turns in one process, with keys of as many layers as do not fit into the caches together.

    python -m scripts.bench.lab.block_attention --threads 1,2 --keys 2048,8192,16384
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from indexcache_lab.kernels.block_attention import block_attention
from scripts.bench.timing import host_ms, times_in_turns

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3.2-1B": (32, 8, 64), "Llama-3.1-8B": (32, 8, 128)}  # H, G, D
BLOCK = 64
HELD = 64 << 20  # bytes of keys and values that calls go through in turn
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    query = q.view(len(q), k.shape[1], -1, q.shape[2])
    shares = (query @ k.mT * q.shape[2] ** -0.5).softmax(-1)
    attended: Tensor = (shares @ v).flatten(1, 2)
    return attended


def chosen(share: int, keys: int) -> Attention:
    number = keys // BLOCK
    generator = torch.Generator().manual_seed(share)
    blocks = torch.randperm(number, generator=generator)[: number // share].sort().values.int()[None]
    lengths = torch.tensor([keys], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(
            q, k, v, blocks, scale=q.shape[2] ** -0.5, block_tokens=BLOCK, lengths=lengths, backend="cpu"
        )

    return call


@torch.inference_mode()
def microseconds(calls: dict[str, Attention], shape: str, keys: int) -> dict[str, float]:
    heads, kv_heads, dim = SHAPES[shape]
    layers = max(2, HELD // (2 * 4 * kv_heads * keys * dim))
    caches = [torch.randn(2, 1, kv_heads, keys, dim) for _ in range(layers)]
    q = torch.randn(1, heads, dim)

    def through(call: Attention) -> None:
        for k, v in caches:
            call(q, k, v)

    turns = {name: partial(through, call) for name, call in calls.items()}
    found = times_in_turns(turns, 21, warm=4, clock=host_ms)
    return {name: round(1e3 * statistics.median(times) / layers, 1) for name, times in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--keys", default="2048,8192,16384")
    options = parser.parse_args()
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for shape in SHAPES:
            for keys in map(int, options.keys.split(",")):
                calls: dict[str, Attention] = {"fused": fused, "grouped": grouped}
                calls |= {f"1/{share} of the blocks": chosen(share, keys) for share in (1, 2, 4, 8)}
                row = microseconds(calls, shape, keys)
                best = min(row["fused"], row["grouped"])
                ratios = {name: round(best / value, 2) for name, value in row.items() if name.startswith("1/")}
                print(
                    json.dumps({"threads": threads, "shape": shape, "keys": keys, "us": row, "faster": ratios}),
                    flush=True,
                )
