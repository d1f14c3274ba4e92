"""Decode steps of a dense model on the CPU: transformers' own attention beside chosen blocks of the cache.

Keys and values of the context are random: what they hold changes no time. Both sides have a static cache and take turns
in one process; medians. F layers choose, S layers reuse their choice.

    python -m scripts.bench.lab.block_decode --model build/smollm2/model --threads 2 --contexts 8192,16384
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from indexcache_search.lab.edge.decoding import Blocks, apply_block_decoding

STEPS = 12


def filled(config: Any, context: int) -> StaticCache:
    """A cache with `context` random tokens."""
    cache = StaticCache(config=config, max_cache_len=context + 8 * STEPS)
    generator = torch.Generator().manual_seed(0)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in cache.layers:
        keys, values = torch.randn(2, 1, config.num_key_value_heads, context, dim, generator=generator)
        layer.update(keys, values)
    return cache


@torch.inference_mode()
def milliseconds(model: Any, cache: StaticCache, blocks: Blocks | None, steps: int) -> list[float]:
    times = []
    with nullcontext() if blocks is None else apply_block_decoding(model, blocks, cache, "cpu"):
        for _ in range(steps):
            began = time.perf_counter()
            model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)
            times.append((time.perf_counter() - began) * 1e3)
    return times[2:]  # the first adds up the keys of all blocks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder; its weights are read")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", default="8192,16384")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = AutoConfig.from_pretrained(options.model)
    config.max_position_embeddings = 1 << 17
    model = AutoModelForCausalLM.from_pretrained(options.model, config=config, dtype=torch.float32).eval()
    model.set_attn_implementation("sdpa")
    layers = config.num_hidden_layers
    plans: dict[str, Blocks | None] = {"everything": None}
    for share in (1.0, 0.25, 0.125):
        plans[f"{share:g} of the blocks, F in all layers"] = Blocks(roles="F" * layers, share=share)
    plans["0.25 of the blocks, F in 1 of 4"] = Blocks(roles=("FSSS" * layers)[:layers], share=0.25)
    for context in [64, *map(int, options.contexts.split(","))]:
        cache = filled(config, context)
        times: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(2):
            for name, blocks in plans.items():
                times[name] += milliseconds(model, cache, blocks, STEPS // 2 + 2)
        row = {name: round(statistics.median(values), 1) for name, values in times.items()}
        print(json.dumps({"context": context, "threads": options.threads, "ms": row}), flush=True)
