"""Which pages queries of a dense model choose: scores of pages, and what a choice remembers of the steps before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_indexcache.pattern.reuse import NO_MEMORY
from sglang_indexcache.pattern.selection import CHUNK, STRIDE, Selection


def token_max_scores(weights: Tensor, selection: Selection, starts: Tensor | None = None) -> Tensor:
    """`[batch, queries, pages]`: the sum over a page's tokens of the largest share that a head gives each.

    Args:
        weights: `[batch, heads, queries, keys]`, a causal layer's attention; the queries are of the last tokens.
        selection: how long a page is.
        starts: `[batch]`, int64: tokens of padding on the left of each sequence; pages are counted behind them.
    """
    keys = weights.shape[3]
    shares = weights.float().amax(1)  # [batch, queries, keys]
    if starts is None:
        whole = F.pad(shares, (0, -keys % selection.page_tokens))
        return whole.view(*shares.shape[:2], -1, selection.page_tokens).sum(3)
    page = page_of(keys, selection, starts, weights)
    scores = torch.zeros(*shares.shape[:2], int(page.max()) + 1, device=weights.device)
    return scores.scatter_add_(2, page[:, None].expand_as(shares), shares)


def compressed_scores(
    query: Tensor, key: Tensor, scale: float, selection: Selection, starts: Tensor | None = None
) -> Tensor:
    """`[batch, queries, pages]`: shares of compressed keys, see `Selection.score`.

    Compressed keys that a query does not see to their end have no share of it; one that touches two pages counts for
    both.

    Args:
        query: `[batch, heads, queries, dim]`, of the last tokens.
        key: `[batch, key_heads, keys, dim]`.
        scale: what products of both are multiplied by.
        selection: how long a page is.
        starts: as for `token_max_scores`.
    """
    if starts is not None:
        rows = [
            compressed_scores(query[[row]], key[[row], :, start:], scale, selection)
            for row, start in enumerate(starts.tolist())
        ]
        most = max(scores.shape[2] for scores in rows)
        return torch.cat([F.pad(scores, (0, most - scores.shape[2])) for scores in rows])
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
    """`[batch, keys]`: how long each token's values `[batch, key_heads, keys, dim]` are, all heads as one vector."""
    return value.float().square().sum((1, 3)).sqrt()


def importance(tokens: Tensor, selection: Selection, starts: Tensor | None = None) -> Tensor:
    """`[batch, pages]`: what no query changes: the largest mean of 32 tokens inside a page (NOSA, equations 5 and 6).

    0 for a page that is not whole. `tokens` is `[batch, keys]`; `starts` as for `token_max_scores`.
    """
    if starts is not None:
        rows = [importance(tokens[[row], start:], selection) for row, start in enumerate(starts.tolist())]
        most = max(found.shape[1] for found in rows)
        return torch.cat([F.pad(found, (0, most - found.shape[1])) for found in rows])
    pages, whole = -(-tokens.shape[1] // selection.page_tokens), tokens.shape[1] // selection.page_tokens
    inside = tokens[:, : whole * selection.page_tokens].view(len(tokens), whole, selection.page_tokens)
    found = inside.unfold(2, CHUNK, STRIDE).mean(-1).amax(-1)
    return F.pad(found, (0, pages - whole))


class Chooser:
    """The choices of one layer, query after query.

    Args:
        selection: how many pages, and what is remembered.
        starts: as for `token_max_scores`.

    Attributes:
        next: position of the query that follows the last one.
    """

    def __init__(self, selection: Selection, starts: Tensor | None = None) -> None:
        self._selection, self._starts = selection, starts
        self.next = 0
        self._steps: Tensor | None = None  # [batch]: since memory began; 0 where there is none
        self._average: Tensor | None = None  # [batch, pages], of ema
        self._kept: Tensor | None = None  # [batch, pages], bool: all that was chosen last
        self._best: Tensor | None = None  # likewise, of that what was chosen by score

    def choose(
        self, scores: Tensor, first: int, prompt: Tensor | None = None, importance: Tensor | None = None
    ) -> Tensor:
        """Which pages queries attend to.

        Args:
            scores: `[batch, queries, pages]`; what lies behind a query does not matter.
            first: position of the first query, padding included; they follow those asked before.
            prompt: `[batch, queries]`, bool: queries that attend to everything.
            importance: of pages, `[batch, pages]`; the policy `nosa` needs it.

        Returns:
            `[batch, queries, pages]`, bool. Tokens behind a query may be among them: causality is the mask's.
        """
        selection = self._selection
        position = torch.arange(first, first + scores.shape[1], device=scores.device)
        self.next = first + scores.shape[1]
        start = 0 if self._starts is None else self._starts[:, None]
        live = ((position[None] - start).clamp_min(0) // selection.page_tokens + 1)[..., None]  # [... or 1, queries, 1]
        number = torch.arange(scores.shape[2], device=scores.device)
        always = (number >= live - selection.recent_pages) & (number < live) | (number < selection.sink_pages)
        open_ = (number < live - selection.recent_pages) & (number >= selection.sink_pages)
        everything = (live <= selection.pages) if prompt is None else (live <= selection.pages) | prompt[..., None]
        steps = selection.steps
        if steps == NO_MEMORY:
            return always | _best(scores, open_, self._wanted) | everything
        if steps.policy == "nosa":
            assert importance is not None and steps.query_pages is not None
            asked = _best(scores, open_, steps.query_pages)
            settled = importance[:, None, : scores.shape[2]].expand(scores.shape)
            return always | asked | _best(settled, open_ & ~asked, self._wanted - steps.query_pages) | everything
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

    @property
    def _wanted(self) -> int:
        return self._selection.pages - self._selection.recent_pages - self._selection.sink_pages

    def _remembering(self, scores: Tensor, open_: Tensor, always: Tensor, everything: Tensor) -> Tensor:
        """One step: `[batch, pages]`; `everything` is `[batch, 1]`."""
        self._grow(scores)
        assert self._steps is not None and self._kept is not None and self._best is not None
        fresh = (self._steps == 0)[:, None]
        policy = self._selection.steps
        if policy.policy == "ema":
            assert self._average is not None and policy.beta is not None
            seen = torch.where(open_ | always, scores, 0.0)
            self._average = torch.where(fresh, seen, policy.beta * self._average + (1 - policy.beta) * seen)
            best = _best(self._average, open_, self._wanted)
        else:
            anew = _best(scores, open_, self._wanted)
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
        """What was kept, the best of it, with its worst pages traded for better ones."""
        assert self._kept is not None
        held = _best(scores, self._kept & open_, self._wanted)
        worst = scores.masked_fill(~held, torch.inf).sort(dim=1, stable=True, descending=False)
        best = scores.masked_fill(held | ~open_, -torch.inf).sort(dim=1, stable=True, descending=True)
        better = best.values[:, :swaps] > worst.values[:, :swaps]  # from the first pair on, then never again
        out = torch.zeros_like(held).scatter_(1, worst.indices[:, :swaps], better)
        into = torch.zeros_like(held).scatter_(1, best.indices[:, :swaps], better)
        return held & ~out | into

    def _grow(self, scores: Tensor) -> None:
        """Make room for as many pages as there are scores of, or begin."""
        if self._steps is None or self._kept is None or self._best is None:
            self._steps = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
            self._kept = self._best = torch.zeros_like(scores, dtype=torch.bool)
            self._average = torch.zeros_like(scores)
            return
        assert self._average is not None
        more = (0, scores.shape[1] - self._kept.shape[1])
        self._kept, self._best, self._average = (F.pad(item, more) for item in (self._kept, self._best, self._average))


def _best(scores: Tensor, open_: Tensor, wanted: int) -> Tensor:
    """The `wanted` best of the open pages, or all of them; of equals the lower page. Shapes `[..., pages]`."""
    open_ = open_.expand(scores.shape)
    ranked = scores.masked_fill(~open_, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(open_).scatter_(-1, ranked[..., :wanted], True) & open_


def page_of(keys: int, selection: Selection, starts: Tensor | None, like: Tensor) -> Tensor:
    """`[batch, keys]`, int64: the page of each token, counted from where its sequence begins."""
    position = torch.arange(keys, device=like.device).expand(len(like), -1)
    if starts is not None:
        position = (position - starts[:, None]).clamp_min(0)
    return position // selection.page_tokens
