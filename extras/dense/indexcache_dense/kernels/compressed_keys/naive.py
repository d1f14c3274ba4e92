"""The definitions, in PyTorch, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_dense.kernels.page_selection.memory import StepMemory
from indexcache_dense.kernels.page_selection.naive import token_slots
from indexcache_dense.kernels.pages import CachedPages, PageBudget

GROUP = 16  # tokens of a mean; a compressed key is of two of them, one after the other


def rows_of(pages: CachedPages, row: int, groups: int) -> Tensor:
    """Return the rows of `means` that hold a request's first `groups` groups, int64."""
    return token_slots(pages, row, groups * GROUP)[::GROUP] // GROUP


def update_means(k: Tensor, means: Tensor, pages: CachedPages, newest: bool) -> None:
    """Write the mean keys of complete groups; see `indexcache_dense.kernels.compressed_keys.update_means`."""
    for row, length in enumerate(pages.lengths.tolist()):
        complete = length // GROUP
        if newest and length % GROUP:
            continue
        rows = rows_of(pages, row, complete)[-1 if newest else 0 :]
        slots = rows[:, None] * GROUP + torch.arange(GROUP, device=rows.device)
        means[rows] = k[slots].float().mean(1).to(k.dtype)


def compressed_scores(
    q: Tensor,
    means: Tensor,
    pages: CachedPages,
    *,
    scale: float,
    budget: PageBudget,
    out: Tensor,
    memory: StepMemory | None,
) -> None:
    """Write into `out`, `[B, N]`, what pages get; see `indexcache_dense.kernels.compressed_keys.compressed_scores`."""
    inside = budget.page_tokens // GROUP
    for row, length in enumerate(pages.lengths.tolist()):
        live, groups = -(-length // budget.page_tokens), length // GROUP
        if live <= budget.pages or (memory is not None and not memory.due(row)):
            continue
        rows = rows_of(pages, row, groups)
        own = means[rows].float().transpose(0, 1)  # [G, groups, D]
        keys = (own[:, :-1] + own[:, 1:]) / 2  # the compressed keys
        heads = q[row].float().view(len(keys), -1, q.shape[2])  # [G, H / G, D]
        shares = (heads @ keys.mT * scale).softmax(-1).sum(1)  # [G, compressed keys]
        for page in range(live):
            touching = shares[:, max(0, page * inside - 1) : (page + 1) * inside]
            out[row, page] = touching.amax(1).sum() if touching.shape[1] else 0.0
