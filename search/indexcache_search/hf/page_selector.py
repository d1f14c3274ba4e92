"""Selection of pages by queries of a dense model: scores of pages, and memory of earlier steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_indexcache.pattern.reuse import NO_MEMORY
from sglang_indexcache.pattern.selection import CHUNK, STRIDE, Selection


def token_max_scores(weights: Tensor, selection: Selection) -> Tensor:
    """Return `[batch, queries, pages]`: the sum over a page's tokens of each one's largest share in any head.

    Args:
        weights: `[batch, heads, queries, keys]`, a causal layer's attention; queries are those of the last tokens.
        selection: gives the page length.
    """
    shares = weights.float().amax(1)  # [batch, queries, keys]
    whole = F.pad(shares, (0, -shares.shape[2] % selection.page_tokens))
    return whole.view(*shares.shape[:2], -1, selection.page_tokens).sum(3)


def compressed_scores(query: Tensor, key: Tensor, scale: float, selection: Selection) -> Tensor:
    """Return `[batch, queries, pages]`: shares of compressed keys, see `Selection.score`.

    A query gives no share to a compressed key that ends after it. A key that touches two pages counts for both.

    Args:
        query: `[batch, heads, queries, dim]`, those of the last tokens.
        key: `[batch, key_heads, keys, dim]`.
        scale: factor of their products.
        selection: gives the page length.
    """
    batch, groups, keys, dim = key.shape
    queries, pages = query.shape[2], -(-keys // selection.page_tokens)
    if keys < CHUNK:
        return query.new_zeros(batch, queries, pages, dtype=torch.float32)
    position = torch.arange(queries, device=key.device) + keys - queries
    compressed = key.float().unfold(2, CHUNK, STRIDE).mean(-1)  # [batch, groups, chunks, dim]
    last = torch.arange(compressed.shape[2], device=key.device) * STRIDE + CHUNK - 1
    ahead = last > position[:, None]  # [queries, chunks]
    grouped = query.float().view(batch, groups, -1, queries, dim)
    shares = query.new_zeros(batch, groups, queries, compressed.shape[2], dtype=torch.float32)
    for head in range(grouped.shape[2]):
        products = grouped[:, :, head] @ compressed.mT * scale
        shares += products.masked_fill(ahead, -torch.inf).softmax(-1).nan_to_num_(0.0)
    inside = selection.page_tokens // STRIDE  # chunks that begin in a page; the one before reaches into it
    padded = F.pad(shares, (1, pages * inside - compressed.shape[2]))
    return padded.unfold(3, inside + 1, inside).amax(-1).sum(1)


def value_norm(value: Tensor) -> Tensor:
    """Return `[batch, keys]`: the norm of each token's values `[batch, key_heads, keys, dim]` over all heads."""
    return value.float().square().sum((1, 3)).sqrt()


def importance(tokens: Tensor, selection: Selection) -> Tensor:
    """Return `[batch, pages]`: the largest mean of 32 tokens in a page, for all queries (NOSA, eq. 5 and 6).

    An incomplete page has 0. `tokens` is `[batch, keys]`.
    """
    pages, whole = -(-tokens.shape[1] // selection.page_tokens), tokens.shape[1] // selection.page_tokens
    inside = tokens[:, : whole * selection.page_tokens].view(len(tokens), whole, selection.page_tokens)
    found = inside.unfold(2, CHUNK, STRIDE).mean(-1).amax(-1)
    return F.pad(found, (0, pages - whole))


class PageSelector:
    """Page selection of one layer, query after query.

    Args:
        selection: the number of pages, and the policy over steps.

    Attributes:
        next: position of the query that follows the last one.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._by_score = selection.pages - selection.recent_pages - selection.sink_pages
        self.next = 0
        self._steps: Tensor | None = None  # [batch]: steps since memory began; 0 or `None` without memory
        self._average = torch.empty(0)  # [batch, pages], for `ema`
        self._kept = torch.empty(0)  # [batch, pages], bool: all pages selected last
        self._best = torch.empty(0)  # [batch, pages], bool: those selected by score

    def choose(
        self, scores: Tensor, first: int, prompt: Tensor | None = None, importance: Tensor | None = None
    ) -> Tensor:
        """Select the pages that queries attend to.

        Args:
            scores: `[batch, queries, pages]`; scores of pages after a query are ignored.
            first: position of the first query; queries follow those of the call before.
            prompt: `[batch, queries]`, bool: queries that attend to everything.
            importance: `[batch, pages]`, required by the policy `nosa`.

        Returns:
            `[batch, queries, pages]`, bool. Pages may hold tokens after a query; the attention mask hides them.
        """
        selection = self._selection
        position = torch.arange(first, first + scores.shape[1], device=scores.device)
        self.next = first + scores.shape[1]
        live = (position // selection.page_tokens + 1)[None, :, None]  # pages that begin up to a query
        number = torch.arange(scores.shape[2], device=scores.device)
        always = (number >= live - selection.recent_pages) & (number < live) | (number < selection.sink_pages)
        open_ = (number < live - selection.recent_pages) & (number >= selection.sink_pages)
        everything = (live <= selection.pages) if prompt is None else (live <= selection.pages) | prompt[..., None]
        steps = selection.steps
        if steps == NO_MEMORY:
            return always | _best(scores, open_, self._by_score) | everything
        if steps.policy == "nosa":
            assert importance is not None and steps.query_pages is not None
            asked = _best(scores, open_, steps.query_pages)
            settled = importance[:, None, : scores.shape[2]].expand(scores.shape)
            return always | asked | _best(settled, open_ & ~asked, self._by_score - steps.query_pages) | everything
        open_ = open_.expand(scores.shape)
        always, everything = always.expand(scores.shape), everything.expand(*scores.shape[:2], 1)
        rows = []
        for row, forgotten in enumerate(everything[..., 0].all(0).tolist()):
            if forgotten:
                self._steps = None
                rows.append(torch.ones_like(always[:, row]))
            else:
                rows.append(self._remembering(scores[:, row], open_[:, row], always[:, row], everything[:, row]))
        return torch.stack(rows, 1)

    def _remembering(self, scores: Tensor, open_: Tensor, always: Tensor, everything: Tensor) -> Tensor:
        """Select the pages `[batch, pages]` of one step; `everything` is `[batch, 1]`."""
        if self._steps is None:
            self._steps = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
            self._kept = self._best = torch.zeros_like(scores, dtype=torch.bool)
            self._average = torch.zeros_like(scores)
        more = (0, scores.shape[1] - self._kept.shape[1])
        self._kept, self._best, self._average = (F.pad(item, more) for item in (self._kept, self._best, self._average))
        fresh = (self._steps == 0)[:, None]
        policy = self._selection.steps
        if policy.policy == "ema":
            assert policy.beta is not None
            seen = torch.where(open_ | always, scores, 0.0)
            self._average = torch.where(fresh, seen, policy.beta * self._average + (1 - policy.beta) * seen)
            best = _best(self._average, open_, self._by_score)
        else:
            anew = _best(scores, open_, self._by_score)
            if policy.policy == "refresh":
                assert policy.every is not None
                anew_now, held = fresh | (self._steps % policy.every == 0)[:, None], self._best & open_
            else:
                assert policy.swaps is not None
                anew_now, held = fresh, self._traded(scores, open_, policy.swaps)
            best = torch.where(anew_now, anew, held)
        self._best, self._kept = best, always | best
        self._steps = torch.where(everything[:, 0], 0, self._steps + 1)
        return self._kept | everything

    def _traded(self, scores: Tensor, open_: Tensor, swaps: int) -> Tensor:
        """Keep the best of the previous pages, but trade the worst of them for better ones."""
        held = _best(scores, self._kept & open_, self._by_score)
        worst = scores.masked_fill(~held, torch.inf).sort(dim=1, stable=True, descending=False)
        best = scores.masked_fill(held | ~open_, -torch.inf).sort(dim=1, stable=True, descending=True)
        better = best.values[:, :swaps] > worst.values[:, :swaps]  # from the first pair on, then never again
        out = torch.zeros_like(held).scatter_(1, worst.indices[:, :swaps], better)
        into = torch.zeros_like(held).scatter_(1, best.indices[:, :swaps], better)
        return held & ~out | into


def _best(scores: Tensor, open_: Tensor, wanted: int) -> Tensor:
    """Select the `wanted` best open pages, or all; of equals the lower one. Shapes are `[..., pages]`."""
    open_ = open_.expand(scores.shape)
    ranked = scores.masked_fill(~open_, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(open_).scatter_(-1, ranked[..., :wanted], True) & open_


def ascending_pages(kept: Tensor, position: Tensor, selection: Selection) -> Tensor:
    """Return `[queries, pages]`: the numbers of kept pages up to that of each query, ascending, then -1.

    `kept` is `[queries, pages]`, bool, and `position` `[queries]`.
    """
    pages = kept.shape[1]
    number = torch.arange(pages, device=kept.device)
    live = kept & (number <= position[:, None] // selection.page_tokens)
    ranked = torch.where(live, number, pages).sort(dim=1).values
    return ranked.masked_fill(ranked == pages, -1)
