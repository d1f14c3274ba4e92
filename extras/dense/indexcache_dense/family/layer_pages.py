"""Keep digests of keys and memory of steps for a layer that selects pages, beside SGLang's cache.

Digests lie where their keys lie. Means are of 16 keys: row i is of slots 16 i to 16 i + 15. Rounded keys have a row for
each slot and key head. Every pass that reads a part of a request writes the digests of all that the request has by
then, whoever wrote its keys: an earlier request with the same prefix, or a copy from the host. Every decoded token
writes that of its group, once it completes one, or its own. So a slot that is used again has no digest of its former
keys by the time that it is read.

Memory of earlier decode steps is of a row of SGLang's table of requests. It begins anew with each pass that reads a
part of the request: when it starts, and when it is read again after a retraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from indexcache_dense.kernels import (
    CachedPages,
    PageBudget,
    RoundedKeys,
    StepMemory,
    compressed_scores,
    page_scores,
    round_keys,
    rounded_scores,
    select_pages,
    update_means,
)
from indexcache_dense.kernels.compressed_keys import GROUP
from indexcache_dense.reuse import NO_MEMORY
from indexcache_dense.selection import COMPRESSED_KEYS, ROUNDED_KEYS, Selection
from indexcache_kernels.backends import Backend


@dataclass(frozen=True)
class LayerPages:
    """Digests and memory of one selecting layer of a rank; see the module.

    Attributes:
        selection: how it selects.
        means: `[slots / 16, G, D]` in the dtype of its keys, if compressed keys score its pages.
        rounded: its keys in 4 bits, if those score its pages.
        steps: `[requests]`, int32: decode steps since the memory of a request began, if the selection has one.
        rows: `[requests, pages]`: averages of scores, float32, or the pages that are held, bool.
    """

    selection: Selection
    means: Tensor | None
    rounded: RoundedKeys | None
    steps: Tensor | None
    rows: Tensor | None

    @classmethod
    def allocate(cls, selection: Selection, keys: Tensor, requests: int, context: int) -> LayerPages:
        """Allocate what a layer keeps.

        Args:
            selection: how it selects.
            keys: `[slots, G, D]`, its cache of keys.
            requests: rows of SGLang's table of requests.
            context: tokens of the longest request.
        """
        means = rounded = steps = rows = None
        if selection.score == COMPRESSED_KEYS:
            means = torch.zeros(-(-len(keys) // GROUP), *keys.shape[1:], dtype=keys.dtype, device=keys.device)
        if selection.score == ROUNDED_KEYS:
            rounded = RoundedKeys.allocate(keys)
        if selection.steps != NO_MEMORY:
            pages = -(-context // selection.page_tokens)
            dtype = torch.float32 if selection.steps.policy == "ema" else torch.bool
            steps = torch.zeros(requests, dtype=torch.int32, device=keys.device)
            rows = torch.zeros(requests, pages, dtype=dtype, device=keys.device)
        return cls(selection, means, rounded, steps, rows)

    @property
    def keeps(self) -> bool:
        """True if it keeps anything: a selection by each step's own attention needs nothing."""
        return any(item is not None for item in (self.means, self.rounded, self.steps))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        kept = (self.means, *(self.rounded or ()), self.steps, self.rows)
        return sum(item.nbytes for item in kept if item is not None)

    def read(self, keys: Tensor, pages: CachedPages, requests: Tensor, backend: Backend) -> None:
        """Keep what a pass that read a part of some requests has made of their pages; arguments as for `select`."""
        self._update(keys, pages, False, backend)
        if self.steps is not None:
            self.steps[requests] = 0

    def select(
        self,
        q: Tensor,
        keys: Tensor,
        pages: CachedPages,
        requests: Tensor,
        *,
        lse: Tensor | None,
        scale: float,
        backend: Backend,
        scores: Tensor | None = None,
        **out: Any,
    ) -> tuple[Tensor, Tensor]:
        """Select the pages that a decode step attends to.

        Args:
            q: `[B, H, D]`, the queries of the step.
            keys: `[slots, G, D]`, the layer's cache, with the keys of the step.
            pages: where the tokens lie.
            requests: `[B]`: rows of SGLang's table of requests.
            lse: `[B, H]`, float32, logarithm of the attention's denominator, if it scores the pages.
            scale: what products of queries and keys are multiplied by.
            backend: of the kernels.
            scores: `[B, pages]`, float32, to write scores into; required for a table that is a list.
            out: where the selection is written, see `select_pages`.

        Returns:
            Page table and lengths, int32, of what is attended to.
        """
        budget = budget_of(self.selection)
        how: dict[str, Any] = {"budget": budget, "memory": self._memory(requests), "backend": backend}
        given = {"scale": scale, "out": scores, **how}
        self._update(keys, pages, True, backend)
        if self.means is not None:
            scores = compressed_scores(q, self.means, pages, **given)
        elif self.rounded is not None:
            scores = rounded_scores(q, self.rounded, pages, **given)
        else:
            assert lse is not None
            scores = page_scores(q, keys, pages, lse=lse, **given)
        return select_pages(scores, pages, **how, **out)

    def _update(self, keys: Tensor, pages: CachedPages, newest: bool, backend: Backend) -> None:
        """Write digests of keys."""
        if self.means is not None:
            update_means(keys, self.means, pages, newest=newest, backend=backend)
        if self.rounded is not None:
            round_keys(keys, self.rounded, pages, newest=newest, backend=backend)

    def _memory(self, requests: Tensor) -> StepMemory | None:
        steps, rows, policy = self.steps, self.rows, self.selection.steps
        if steps is None or rows is None:
            return None
        if policy.policy == "ema":
            assert policy.beta is not None
            return StepMemory(requests.long(), steps, averages=rows, beta=policy.beta)
        assert policy.every is not None
        return StepMemory(requests.long(), steps, held=rows, every=policy.every)


def budget_of(selection: Selection) -> PageBudget:
    """Return a selection in the form of the kernels."""
    return PageBudget(selection.page_tokens, selection.pages, selection.recent_pages, selection.sink_pages)
