"""Time of a dense model's decode steps on this CPU, with and without selected blocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import StaticCache

from indexcache_lab.dense import describe_dense, key_heads
from indexcache_lab.edge.decoding import Blocks, apply_block_decoding
from indexcache_search.hf.loading import load_model

STEPS, WARM = 8, 2  # of a turn; the first ones add up the keys of all blocks
TURNS = 2


def load(model: str) -> Any:
    """Load a dense model in float32.

    Raises:
        SearchError: if it can't be found or loaded, or has indexers.
    """
    loaded, _ = load_model(model, describe_dense(model), torch.float32)
    loaded.set_attn_implementation("sdpa")
    return loaded.eval()


def measured(model: Any, plans: Mapping[str, Blocks | None], contexts: Sequence[int]) -> Iterator[dict[str, float]]:
    """Yield for each context the milliseconds of a step by plan: medians, with plans taking turns in one process."""
    for context in contexts:
        cache = _filled(model.config, context, STEPS * TURNS * len(plans))
        times: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(TURNS):
            for name, blocks in plans.items():
                times[name] += _turn(model, cache, blocks)
        yield {name: statistics.median(found) for name, found in times.items()}


def _filled(config: Any, context: int, more: int) -> StaticCache:
    """Make a cache with `context` random tokens, which take as long as real ones, and room for `more`."""
    cache = StaticCache(config=config, max_cache_len=context + more)
    generator = torch.Generator().manual_seed(0)
    heads, dim = key_heads(config)
    for layer in cache.layers:
        layer.update(*torch.randn(2, 1, heads, context, dim, generator=generator))
    return cache


@torch.inference_mode()
def _turn(model: Any, cache: StaticCache, blocks: Blocks | None) -> list[float]:
    times = []
    with nullcontext() if blocks is None else apply_block_decoding(model, blocks, cache):
        for _ in range(STEPS):
            began = time.perf_counter()
            model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)
            times.append((time.perf_counter() - began) * 1e3)
    return times[WARM:]
