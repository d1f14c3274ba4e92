"""Which pages a policy selects, and what it remembers of the decode steps before (`pattern.reuse`).

Shapes are static and nothing waits for the device, so that a CUDA graph can hold a step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from indexcache_dense.selection import Selection


def best_pages(scores: Tensor, open_: Tensor, wanted: int) -> Tensor:
    """Select the `wanted` best open pages, or all; of equals the lower one. Shapes are `[..., pages]`."""
    open_ = open_.expand(scores.shape)
    ranked = scores.masked_fill(~open_, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(open_).scatter_(-1, ranked[..., :wanted], True) & open_


def by_score(selection: Selection) -> int:
    """Return how many pages of a selection are those of no fixed place."""
    return selection.pages - selection.recent_pages - selection.sink_pages


def without_memory(selection: Selection, scores: Tensor, open_: Tensor, importance: Tensor | None) -> Tensor:
    """Select by the policies `none` and `nosa`, which remember nothing; other policies begin as `none`.

    Args:
        selection: the number of pages, and the policy.
        scores: `[..., pages]`.
        open_: likewise, bool: pages that can be selected by score.
        importance: `[..., pages]`, required by `nosa`.

    Returns:
        `[..., pages]`, bool.
    """
    steps, wanted = selection.steps, by_score(selection)
    if steps.policy != "nosa":
        return best_pages(scores, open_, wanted)
    assert importance is not None and steps.query_pages is not None
    asked = best_pages(scores, open_, steps.query_pages)
    return asked | best_pages(importance.expand(scores.shape), open_ & ~asked, wanted - steps.query_pages)


class StepMemory:
    """Memory of earlier decode steps, for rows of pages; it is updated in place.

    Attributes:
        steps: `[rows]`, int64: steps since memory began.
        average: `[rows, pages]`, of `ema`: scores averaged over steps.
        kept: `[rows, pages]`, bool: all pages selected last.
        best: `[rows, pages]`, bool: those of them that were selected by score.
    """

    def __init__(self, rows: int, pages: int, device: torch.device | str) -> None:
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self.average = torch.zeros(rows, pages, device=device)
        self.kept, self.best = torch.zeros(2, rows, pages, dtype=torch.bool, device=device)

    def grow(self, pages: int) -> None:
        """Make room for as many pages."""
        more = (0, pages - self.kept.shape[1])
        self.average, self.kept, self.best = (F.pad(item, more) for item in (self.average, self.kept, self.best))

    def choose(
        self, selection: Selection, scores: Tensor, always: Tensor, open_: Tensor, importance: Tensor | None = None
    ) -> Tensor:
        """Select the pages of a step, `[rows, pages]`, bool, and remember them.

        Args:
            selection: the number of pages, and the policy.
            scores: `[rows, pages]`.
            always: `[rows, pages]`, bool: pages that are selected in any case.
            open_: `[rows, pages]`, bool: pages that can be selected by score.
            importance: `[rows, pages]`, required by `nosa`.
        """
        policy, wanted = selection.steps, by_score(selection)
        fresh = (self.steps == 0)[:, None]
        if policy.policy == "ema":
            assert policy.beta is not None
            seen = torch.where(open_ | always, scores, 0.0)
            self.average.copy_(torch.where(fresh, seen, policy.beta * self.average + (1 - policy.beta) * seen))
            best = best_pages(self.average, open_, wanted)
        else:
            best = without_memory(selection, scores, open_, importance)
            if policy.policy == "refresh":
                assert policy.every is not None
                anew = fresh | (self.steps % policy.every == 0)[:, None]
                best = torch.where(anew, best, self.best & open_)
            elif policy.policy == "bounded":
                assert policy.swaps is not None
                best = torch.where(fresh, best, self._traded(scores, open_, wanted, policy.swaps))
        self.best.copy_(best)
        self.kept.copy_(always | best)
        self.steps += 1
        kept: Tensor = self.kept.clone()
        return kept

    def _traded(self, scores: Tensor, open_: Tensor, wanted: int, swaps: int) -> Tensor:
        """Keep the best of the previous pages, but trade the worst of them for better ones."""
        held = best_pages(scores, self.kept & open_, wanted)
        worst = scores.masked_fill(~held, torch.inf).sort(dim=1, stable=True, descending=False)
        best = scores.masked_fill(held | ~open_, -torch.inf).sort(dim=1, stable=True, descending=True)
        better = best.values[:, :swaps] > worst.values[:, :swaps]  # from the first pair on, then never again
        out = torch.zeros_like(held).scatter_(1, worst.indices[:, :swaps], better)
        into = torch.zeros_like(held).scatter_(1, best.indices[:, :swaps], better)
        traded: Tensor = held & ~out | into
        return traded
