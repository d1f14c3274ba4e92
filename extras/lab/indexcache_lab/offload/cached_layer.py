"""Keys and values of one layer in offloaded decoding: what lies on the device and what in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from indexcache_lab.kernels import copy_blocks
from indexcache_lab.offload.chooser import Choice


@dataclass
class CachedLayer:
    """Keys and values of one layer, `[2, B, G, tokens, D]`.

    Attributes:
        block_tokens: tokens of a block.
        device: of a `D` layer all tokens; of others the buffer's slots, and behind them the block being written.
        host: of layers other than `D`, every full block, `[2, B, G, blocks, block tokens, D]`; pinned if there is
            a CUDA device.
        bias: of layers other than `D`, what trained heads add to the scaled products of each token,
            `[B, G, blocks, block tokens]`, float32; `None` without such heads. All of it stays on the device.
        ready: recorded after the copies that run beside the computation.
    """

    block_tokens: int
    device: Tensor
    host: Tensor | None
    bias: Tensor | None = None
    ready: torch.cuda.Event | None = None

    @property
    def _slots(self) -> Tensor:
        """A view of the buffer, `[2 B G, slots + 1, block tokens, D]`."""
        return self.device.view(self.device.shape[:3].numel(), -1, self.block_tokens, self.device.shape[-1])

    def begin(self, request: int, item: Tensor) -> None:
        """Store a prompt's keys and values, `[2, G, L, D]`; the buffer begins with the last full blocks."""
        size, length, own = self.block_tokens, item.shape[2], self.device[:, request]
        full = (length - 1) // size  # the last block is being written, even if it is full
        if self.host is None:
            own[:, :, :length] = item
            return
        slots = own.shape[2] // size - 1
        first, blocks = max(0, full - slots), item[:, :, : full * size]
        self.host[:, request, :, :full].copy_(blocks.reshape(2, -1, full, size, item.shape[3]))
        own[:, :, : (full - first) * size] = item[:, :, first * size : full * size]
        own[:, :, slots * size : slots * size + length - full * size] = item[:, :, full * size :]

    def copy_missing(self, choice: Choice) -> None:
        """Copy the selected blocks that the buffer misses."""
        assert self.host is not None
        copy_blocks(self.host.flatten(0, 2), self._slots, *choice.copies)

    def keep_filled(self, choice: Choice) -> None:
        """Copy blocks that the previous token filled to host memory, and to their slots in the buffer."""
        assert self.host is not None
        held, (block, slot) = self._slots, choice.filled
        written = torch.full_like(block, held.shape[1] - 1)
        copy_blocks(held, self.host.flatten(0, 2), written, block, block >= 0)
        copy_blocks(held, held, written, slot, slot >= 0)
