"""The definitions, in PyTorch, one request after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from indexcache_dense.kernels.page_selection.memory import StepMemory
from indexcache_dense.kernels.page_selection.naive import token_slots
from indexcache_dense.kernels.pages import CachedPages, PageBudget

LEVELS = 15  # steps from the smallest dimension of a key to the largest


class RoundedKeys(NamedTuple):
    """Keys of a cache in 4 bits a dimension, those of a key head side by side.

    Attributes:
        codes: `[G, slots, D / 2]`, uint8: byte d holds dimension d in its low bits, and d + D / 2 in its high bits.
        ranges: `[G, slots, 2]`, float16: a key's smallest dimension, and the step from one level to the next.
    """

    codes: Tensor
    ranges: Tensor

    @classmethod
    def allocate(cls, k: Tensor) -> RoundedKeys:
        """Allocate room for the keys of a cache, `[slots, G, D]`."""
        slots, heads, dim = k.shape
        codes = torch.zeros(heads, slots, dim // 2, dtype=torch.uint8, device=k.device)
        return cls(codes, torch.zeros(heads, slots, 2, dtype=torch.float16, device=k.device))

    @classmethod
    def of(cls, k: Tensor) -> RoundedKeys:
        """Round keys `[..., D]`; the results have the axes of `k` before D."""
        k = k.float()
        low = k.amin(-1).half()
        step = ((k.amax(-1) - low.float()) / LEVELS).half()
        apart, unit = k - low.float()[..., None], step.float()[..., None]
        codes = torch.where(unit > 0, (apart / unit + 0.5).floor(), 0.0).clamp(0, LEVELS).to(torch.uint8)
        first, second = codes.chunk(2, -1)
        return cls(first | second << 4, torch.stack([low, step], -1))

    @property
    def keys(self) -> Tensor:
        """Rounded keys, float32: `[G, slots, D]`, or with the axes that `of` was given."""
        codes = torch.cat([self.codes & 15, self.codes >> 4], -1).float()
        low, step = self.ranges.float()[..., None].unbind(-2)
        return low + step * codes


def round_keys(k: Tensor, rounded: RoundedKeys, pages: CachedPages, newest: bool) -> None:
    """Write the rounded keys of requests; see `indexcache_dense.kernels.rounded_keys.round_keys`."""
    for row, length in enumerate(pages.lengths.tolist()):
        slots = token_slots(pages, row, length)[-1 if newest else 0 :]
        rounded.codes[:, slots], rounded.ranges[:, slots] = RoundedKeys.of(k[slots].transpose(0, 1))


def rounded_scores(
    q: Tensor,
    rounded: RoundedKeys,
    pages: CachedPages,
    *,
    scale: float,
    budget: PageBudget,
    out: Tensor,
    memory: StepMemory | None,
) -> None:
    """Write into `out`, `[B, N]`, what pages get; see `indexcache_dense.kernels.rounded_keys.rounded_scores`."""
    for row, length in enumerate(pages.lengths.tolist()):
        live = -(-length // budget.page_tokens)
        if live <= budget.pages or (memory is not None and not memory.due(row)):
            continue
        slots = token_slots(pages, row, length)
        keys = RoundedKeys(rounded.codes[:, slots], rounded.ranges[:, slots]).keys  # [G, L, D]
        heads = q[row].float().view(len(keys), -1, q.shape[2])  # [G, H / G, D]
        shares = (heads @ keys.mT * scale).softmax(-1)  # [G, H / G, L]
        padded = F.pad(shares, (0, live * budget.page_tokens - length))
        out[row, :live] = padded.view(*shares.shape[:2], live, -1).sum(3).amax(1).sum(0)
