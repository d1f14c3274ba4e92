"""Selection of pages by queries of a dense model: scores of pages, and memory of earlier steps.

A *row* has selections of its own: a sequence of the batch, or with `heads: key` one key head of a sequence (sequence 0
with all of its key heads, then sequence 1). Rows know nothing of each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from indexcache_dense.hf.step_memory import StepMemory, without_memory
from indexcache_dense.kernels import RoundedKeys
from indexcache_dense.selection import CHUNK, JOINT, STRIDE, Selection


def rows_a_sequence(selection: Selection, key_heads: int) -> int:
    """Return how many selections a layer makes for a query: one for all heads, or one for each key head."""
    return 1 if selection.heads == JOINT else key_heads


def token_max_scores(weights: Tensor, selection: Selection, key_heads: int) -> Tensor:
    """Return `[rows, queries, pages]`: the sum over a page's tokens of each one's largest share in any head of the row.

    Args:
        weights: `[batch, heads, queries, keys]`, a causal layer's attention; queries are those of the last tokens.
        selection: gives the page length, and which heads share a row.
        key_heads: of the layer.
    """
    batch, _, queries, keys = weights.shape
    by_row = weights.float().reshape(batch * rows_a_sequence(selection, key_heads), -1, queries, keys)
    shares = by_row.amax(1)  # [rows, queries, keys]
    whole = F.pad(shares, (0, -shares.shape[2] % selection.page_tokens))
    return whole.view(*shares.shape[:2], -1, selection.page_tokens).sum(3)


def compressed_scores(query: Tensor, key: Tensor, scale: float, selection: Selection) -> Tensor:
    """Return `[rows, queries, pages]`: shares of compressed keys, see `Selection.score`.

    A query gives no share to a compressed key that ends after it. A key that touches two pages counts for both.

    Args:
        query: `[batch, heads, queries, dim]`, those of the last tokens.
        key: `[batch, key_heads, keys, dim]`.
        scale: factor of their products.
        selection: gives the page length, and which heads share a row.
    """
    batch, groups, keys, dim = key.shape
    queries, pages = query.shape[2], -(-keys // selection.page_tokens)
    if keys < CHUNK:
        rows = batch * rows_a_sequence(selection, groups)
        return query.new_zeros(rows, queries, pages, dtype=torch.float32)
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
    by_head = padded.unfold(3, inside + 1, inside).amax(-1)  # [batch, groups, queries, pages]
    return by_head.sum(1) if selection.heads == JOINT else by_head.flatten(0, 1)


def rounded_scores(query: Tensor, key: Tensor, scale: float, selection: Selection) -> Tensor:
    """Return `[rows, queries, pages]`: shares of attention over rounded keys, see `Selection.score`.

    Args:
        query: `[batch, heads, queries, dim]`, those of the last tokens.
        key: `[batch, key_heads, keys, dim]`.
        scale: factor of their products.
        selection: gives the page length, and which heads share a row.
    """
    batch, groups, keys, dim = key.shape
    queries, page = query.shape[2], selection.page_tokens
    position = torch.arange(queries, device=key.device) + keys - queries
    ahead = torch.arange(keys, device=key.device) > position[:, None]  # [queries, keys]
    rounded = RoundedKeys.of(key).keys
    grouped = query.float().view(batch, groups, -1, queries, dim)
    largest = query.new_zeros(batch, groups, queries, -(-keys // page), dtype=torch.float32)
    for head in range(grouped.shape[2]):
        products = grouped[:, :, head] @ rounded.mT * scale
        shares = products.masked_fill(ahead, -torch.inf).softmax(-1)  # [batch, groups, queries, keys]
        by_page = F.pad(shares, (0, -keys % page)).view(*shares.shape[:3], -1, page).sum(4)
        largest = torch.maximum(largest, by_page)
    return largest.sum(1) if selection.heads == JOINT else largest.flatten(0, 1)


def value_norm(value: Tensor, selection: Selection) -> Tensor:
    """Return `[rows, keys]`: the norm of a token's values `[batch, key_heads, keys, dim]`, those of the row's heads."""
    squares = value.float().square().sum(3)  # [batch, key_heads, keys]
    return (squares.sum(1) if selection.heads == JOINT else squares.flatten(0, 1)).sqrt()


def importance(tokens: Tensor, selection: Selection) -> Tensor:
    """Return `[rows, pages]`: the largest mean of 32 tokens in a page, for all queries (NOSA, eq. 5 and 6).

    An incomplete page has 0. `tokens` is `[rows, keys]`.
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
        self.next = 0
        self._memory: StepMemory | None = None

    def choose(
        self, scores: Tensor, first: int, prompt: Tensor | None = None, importance: Tensor | None = None
    ) -> Tensor:
        """Select the pages that queries attend to.

        Args:
            scores: `[rows, queries, pages]`; scores of pages after a query are ignored.
            first: position of the first query; queries follow those of the call before.
            prompt: `[rows, queries]`, bool: queries that attend to everything.
            importance: `[rows, pages]`, required by the policy `nosa`.

        Returns:
            `[rows, queries, pages]`, bool. Pages may hold tokens after a query; the attention mask hides them.
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
        if steps.policy in ("none", "nosa"):
            settled = None if importance is None else importance[:, None, : scores.shape[2]]
            return always | without_memory(selection, scores, open_, settled) | everything
        open_ = open_.expand(scores.shape)
        always, everything = always.expand(scores.shape), everything.expand(*scores.shape[:2], 1)
        rows = []
        for row, forgotten in enumerate(everything[..., 0].all(0).tolist()):
            if forgotten:
                self._memory = None
                rows.append(torch.ones_like(always[:, row]))
            else:
                rows.append(self._remembering(scores[:, row], open_[:, row], always[:, row], everything[:, row]))
        return torch.stack(rows, 1)

    def _remembering(self, scores: Tensor, open_: Tensor, always: Tensor, everything: Tensor) -> Tensor:
        """Select the pages `[rows, pages]` of one step; `everything` is `[rows, 1]`."""
        if self._memory is None:
            self._memory = StepMemory(scores.shape[0], scores.shape[1], scores.device)
        self._memory.grow(scores.shape[1])
        kept = self._memory.choose(self._selection, scores, always, open_)
        self._memory.steps.masked_fill_(everything[:, 0], 0)
        return kept | everything


def ascending_pages(kept: Tensor, position: Tensor, selection: Selection) -> Tensor:
    """Return `[queries, pages]`: the numbers of kept pages up to that of each query, ascending, then -1.

    `kept` is `[queries, pages]`, bool, and `position` `[queries]`.
    """
    pages = kept.shape[1]
    number = torch.arange(pages, device=kept.device)
    live = kept & (number <= position[:, None] // selection.page_tokens)
    ranked = torch.where(live, number, pages).sort(dim=1).values
    return ranked.masked_fill(ranked == pages, -1)
