"""Selection of blocks by decode steps in one layer, from a state that stays on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_dense.hf.page_selector import importance, rows_a_sequence
from indexcache_dense.hf.pages import Importance, token_importance
from indexcache_dense.hf.step_memory import StepMemory
from indexcache_dense.selection import CHUNK, STRIDE, Selection
from indexcache_lab.kernels import block_scores, compress_keys


class StepSelector:
    """State of a selecting layer, for rows that select apart: requests, or with `heads: key` their key heads.

    Shapes are static and nothing waits for the device, so that a CUDA graph can hold a step.

    Args:
        layer: number of the layer.
        selection: by compressed keys.
        trained: trained heads, if the selection asks for them.
        like: keys of a step, `[B, G, D]`: gives shape, dtype and device.
        blocks: of the longest request.

    Attributes:
        compressed: `[B, G, C + 1, D]`, means of 32 keys, 16 tokens apart; the last one is a dummy that is never read.
        last: `[B, G, 32, D]`, the last keys, at their position modulo 32.
        memory: of earlier steps, `[rows, blocks]`.
        tokens: `[rows, block tokens]`, float32: importance of the tokens of the block being written.
        importance: `[rows, blocks + 1]`, float32: that of whole blocks; the last one is a dummy.
    """

    def __init__(self, layer: int, selection: Selection, trained: Importance | None, like: Tensor, blocks: int) -> None:
        self._layer, self._selection, self._trained, self._blocks = layer, selection, trained, blocks
        (requests, groups, dim), self._size = like.shape, selection.page_tokens
        self._own = rows_a_sequence(selection, groups)  # rows of a request
        self._requests, rows = torch.arange(requests, device=like.device), requests * self._own
        chunks = max(0, (blocks * self._size - CHUNK) // STRIDE + 1)
        self.compressed = like.new_zeros(requests, groups, chunks + 1, dim)
        self.last = like.new_zeros(requests, groups, CHUNK, dim)
        self.memory = StepMemory(rows, blocks, like.device)
        self.tokens = torch.zeros(rows, self._size, device=like.device)
        self.importance = torch.zeros(rows, blocks + 1, device=like.device)

    def begin(self, request: int, keys: Tensor, values: Tensor) -> None:
        """Begin a request with a prompt's keys and values, `[G, L, D]`."""
        length, full = keys.shape[1], (keys.shape[1] - 1) // self._size  # the last block is being written
        compressed = compress_keys(keys[None])[0]
        self.compressed[request, :, : compressed.shape[1]] = compressed
        last = torch.arange(length - CHUNK, length, device=keys.device)
        self.last[request, :, last % CHUNK] = keys[:, last]
        rows = slice(request * self._own, (request + 1) * self._own)
        self.memory.steps[rows] = 0
        if self._selection.steps.policy == "nosa":
            tokens = token_importance(self._trained, self._layer, values[None], self._selection)
            found = importance(tokens, self._selection)
            self.importance[rows, : found.shape[1]] = found
            self.tokens[rows, : length - full * self._size] = tokens[:, full * self._size :]

    def remember(self, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Store what selections need of new keys and values, `[B, G, D]`, at these positions, `[B]`."""
        self.last[self._requests, :, positions % CHUNK] = key
        begins, dummy = positions + 1 - CHUNK, self.compressed.shape[2] - 1
        number = torch.where((begins >= 0) & (begins % STRIDE == 0), begins // STRIDE, dummy)
        self.compressed[self._requests, :, number] = self.last.float().mean(2).to(key.dtype)
        if self._selection.steps.policy != "nosa":
            return
        position = positions.repeat_interleave(self._own)
        row = torch.arange(len(position), device=position.device)
        tokens = token_importance(self._trained, self._layer, value[:, :, None], self._selection)[:, 0]
        self.tokens[row, position % self._size] = tokens
        full = (position + 1) % self._size == 0
        block = torch.where(full, position // self._size, self._blocks)
        self.importance[row, block] = importance(self.tokens, self._selection)[:, 0]

    def requested(self, positions: Tensor, query: Tensor, scale: float) -> Tensor:
        """Select blocks beside the one being written, `[rows, K]`, int32, ascending.

        Args:
            positions: of the newest tokens, `[B]`.
            query: theirs, `[B, H, D]`.
            scale: factor of products.
        """
        selection = self._selection
        scores = block_scores(
            query,
            self.compressed,
            (positions + 1).int(),
            scale=scale,
            block_tokens=self._size,
            heads=selection.heads,
        )[..., : self._blocks].reshape(-1, self._blocks)
        block = torch.arange(self._blocks, device=query.device)
        newest = (positions // self._size).repeat_interleave(self._own)[:, None]
        open_ = (block >= selection.sink_pages) & (block <= newest - selection.recent_pages)
        always = (block <= newest) & ~open_
        kept = self.memory.choose(selection, scores, always, open_, self.importance[:, : self._blocks])
        chosen = torch.where(kept & (block < newest), block, self._blocks)
        return chosen.sort(1).values[:, : selection.pages - 1].int()
