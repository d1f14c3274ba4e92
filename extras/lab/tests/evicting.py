"""Plans with eviction heads, and models that have some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from indexcache_lab.eviction.heads import EvictionHeads
from tests.conftest import LAYERS

LENGTH = 200
PLAN = Selection(
    page_tokens=32,
    pages=4,
    recent_pages=2,
    sink_pages=0,
    score="compressed_keys",
    steps=ReusePolicy.parse("nosa:1:heads"),
)
ALL = replace(PLAN, pages=LENGTH)
EVERY = "F" * LAYERS


def heads_for(model: Any, use: Any = "always", seed: int = 3) -> EvictionHeads:
    heads = EvictionHeads.like(model.config, use, seed)
    with torch.no_grad():
        heads.scale.copy_(torch.randn(heads.scale.shape, generator=torch.Generator().manual_seed(seed)))
    return heads
