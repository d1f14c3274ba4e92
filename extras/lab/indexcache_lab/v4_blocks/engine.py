"""The transformers engine for DeepSeek-V4 patterns with blocks: `FSFS+0q4` in searches and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from indexcache_lab.v4_blocks.definition import in_blocks
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.prefix import PrefixCache
from indexcache_search.engines.transformers import TransformersEngine


class EntryBlocksEngine(TransformersEngine):
    """The engine, whose layers may select for blocks of prompt queries; these patterns run from the first layer."""

    @torch.inference_mode()
    def _hidden(
        self, pattern: Any, data: TokenSet, cache: PrefixCache | None, rows: Sequence[int]
    ) -> tuple[Tensor, int]:
        prompt = self._prompt(data, rows)
        if not pattern.indexers or prompt is None:
            return super()._hidden(pattern, data, cache, rows)
        with in_blocks(self.torch_model, pattern.indexers, prompt):
            return super()._hidden(pattern.plain(), data, None, rows)
