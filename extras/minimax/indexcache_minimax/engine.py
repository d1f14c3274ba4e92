"""The reference engine for MiniMax-M3: transformers' text model, whose layers choose blocks for each index head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indexcache_search.data.tokens import TokenSet, sampled_queries
from indexcache_search.engines.base import OVERLAP
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import SHARED


class BlockEngine(TransformersEngine):
    """Engine that evaluates patterns of layers that choose blocks."""

    @torch.inference_mode()
    def matrix(self, name: str, data: TokenSet, rows: int) -> NDArray[np.float64] | None:
        """See `Engine.matrix`; the overlap is of blocks, a mean over index heads."""
        if name != OVERLAP:
            return super().matrix(name, data, rows)
        total, count = np.zeros((self.model.num_layers, self.model.num_layers)), 0
        queries = torch.from_numpy(sampled_queries(data.seq_len, self.model.first_sparse_position, rows))
        chosen: dict[int, Tensor] = {}
        for row in range(data.num_sequences):
            with apply_roles(self.torch_model, self.model.native, chosen.__setitem__):
                self.torch_model(input_ids=self._tokens(data, [row]), use_cache=False, logits_to_keep=1)
            masks = torch.stack([self._mask(chosen[site][0][:, queries], data) for site in range(len(chosen))])
            total += (masks @ masks.T).double().cpu().numpy() / chosen[0].shape[-1]
            count += chosen[0].shape[1] * len(queries)
        return total / count

    def selections(self, pattern: Pattern, data: TokenSet, row: int, steps: int) -> dict[int, NDArray[np.int32]]:
        """See `TransformersEngine.selections`; blocks, a row for each index head."""
        found: dict[int, NDArray[np.int32]] = {}

        def keep(letter: int, chosen: Tensor) -> None:
            if pattern[letter] != SHARED:
                found[letter] = chosen[0, :, -steps:].int().cpu().numpy()

        with torch.inference_mode(), apply_roles(self.torch_model, pattern, keep):
            self.torch_model(self._tokens(data, [row]), use_cache=False, logits_to_keep=1)
        return found

    def _chosen_bytes(self, data: TokenSet) -> int:
        heads: Any = self.torch_model.config.index_n_heads
        return int(4 * heads * self.torch_model.config.index_topk_blocks)

    def _mask(self, chosen: Tensor, data: TokenSet) -> Tensor:
        """Return `[heads x queries x blocks]`, 1 where a block was chosen, of queries that all have a choice."""
        blocks = -(-data.seq_len // self.torch_model.config.index_block_size)
        return torch.zeros(*chosen.shape[:-1], blocks, device=chosen.device).scatter_(-1, chosen, 1.0).flatten()
