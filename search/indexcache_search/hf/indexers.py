"""Indexers of transformers' DSA models in other ways: on a CPU without hidden keys, and in blocks of prompt queries.

In blocks this is the definition, not a fast implementation: the exact selection is computed too. The queries of a block
share what their mean (the *leader*) scores highest among the tokens before the block, as many as leave room for the
block. The tokens of the block up to a query always belong to its selection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.indexer_forward import check_indexer, indexer_forward
from indexcache_kernels.transformers import INDEXER_ROPES, index_vectors
from indexcache_search.errors import SearchError

Run = Callable[..., Tensor]
"""The `forward` of an indexer: hidden states, query residual, cosine and sine, and mask to `[batch, queries, k]`."""

QUERIES = 128  # scored at a time on a CPU
_BLOCKS = 64  # blocks scored at a time


def check_call(indexer: nn.Module) -> None:
    """Check that transformers calls an indexer with a known signature.

    Raises:
        SearchError: if not.
    """
    try:
        check_indexer(type(indexer))
    except KernelInputError as error:
        raise SearchError(str(error)) from None


def causal(indexer: Any, run: Run) -> Run:
    """Wrap `run`, the `forward` of an indexer, so that no query is scored with the keys behind its block.

    What is left is computed as transformers does, but for all heads at once, and hidden keys have the mask's value. So
    selections are the same to the last index, ties and what fills up short ones included. With a key/value cache, or a
    mask that shows later keys, `run` itself runs.
    """
    check_call(indexer)

    def compute(hidden: Tensor, q_resid: Tensor, rotary: tuple[Tensor, Tensor], given: Tensor, *rest: Any) -> Tensor:
        batch, length, _ = hidden.shape
        blocks = [slice(begin, begin + QUERIES) for begin in range(0, length, QUERIES)]
        mask = torch.where(given, 0.0, -torch.inf) if given.dtype == torch.bool else given
        lowest, (_, cache) = torch.finfo(mask.dtype).min, rest
        if cache is not None or any((mask[:, rows, rows.stop :] > lowest).any() for rows in blocks):
            return run(hidden, q_resid, rotary, given, *rest)
        q, k, _ = index_vectors(indexer, INDEXER_ROPES[indexer.config.model_type], hidden, q_resid, rotary)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        weights, scores = weights * indexer.n_heads**-0.5, mask.float().expand(batch, -1, -1).clone()
        for rows in blocks:
            heads = q[:, rows].flatten(1, 2).float() @ k[:, : rows.stop].float().mT
            heads = heads.mul_(indexer.softmax_scale).relu_().view(batch, -1, indexer.n_heads, heads.shape[-1])
            scores[:, rows, : rows.stop] += (weights[:, rows, None] @ heads).squeeze(2)
        return scores.topk(min(indexer.index_topk, length), dim=-1).indices.int()

    return indexer_forward(compute)


def in_blocks(indexer: Any, run: Run, queries: int, prompt: Tensor) -> Run:
    """Wrap `run` so that blocks of `queries` neighbours share a selection where `prompt` is set.

    Sequences must begin with their first token.

    Args:
        indexer: an indexer of a transformers DSA model.
        run: its `forward`.
        queries: block size; blocks begin at its multiples.
        prompt: `[batch, queries]`, bool.

    Raises:
        SearchError: if a block is larger than the selection; when called, if there is a key/value cache, or padding
            before a sequence on the kernels.
    """
    if queries > indexer.index_topk:
        raise SearchError(f"{queries} queries at a time, expected at most index_topk ({indexer.index_topk})")

    def compute(  # noqa: PLR0917
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None,
        cache: Any,
    ) -> Tensor:
        if cache is not None:
            raise SearchError("prompts that share selections run in one pass, expected no key/value cache")
        exact = run(hidden_states, q_resid, position_embeddings, attention_mask, position_ids)
        rope = INDEXER_ROPES[indexer.config.model_type]
        q, k, weights = index_vectors(indexer, rope, hidden_states, q_resid, position_embeddings)
        shared = block_selection(q, k, weights, queries, indexer.index_topk, prompt=prompt)
        exact = F.pad(exact, (0, shared.shape[-1] - exact.shape[-1]), value=-1)  # it may be as short as the sequence
        if attention_mask.dtype == torch.int32:
            if attention_mask[..., 0].any():
                raise SearchError("blocks begin with a sequence's first token, expected no padding before it")
        else:  # transformers makes a mask of the indices, where -1 can't stand
            own = torch.arange(shared.shape[1], device=shared.device, dtype=shared.dtype)[:, None]
            exact, shared = (torch.where(item < 0, own, item) for item in (exact, shared))
        return torch.where(prompt[..., None], shared, exact)

    return indexer_forward(compute)


def block_selection(q: Tensor, k: Tensor, weights: Tensor, queries: int, topk: int, *, prompt: Tensor) -> Tensor:
    """Return the selection of queries in blocks, `[batch, queries, topk]`, int32, -1 for none.

    All queries of a block select the `topk - queries` tokens before it that the block's leader scores highest, and
    query t also the block's tokens up to itself. The leader's index query and head weights are means over the block's
    queries in `prompt`.

    Args:
        q: index queries `[batch, queries, heads, dim]`.
        k: index keys `[batch, queries, dim]`.
        weights: head weights with all scales, `[batch, queries, heads]`.
        queries: block size, at most `topk`.
        topk: tokens per selection.
        prompt: `[batch, queries]`, bool.
    """
    batch, length = prompt.shape
    padding, blocks = -length % queries, (batch, -1, queries)
    counted = F.pad(prompt, (0, padding)).view(blocks)
    share = counted / counted.sum(2, keepdim=True).clamp_min(1)  # of each query in its block's leader
    q, weights = F.pad(q.float(), (0, 0, 0, 0, 0, padding)), F.pad(weights.float(), (0, 0, 0, padding))
    q = (q.view(*blocks, *q.shape[2:]) * share[..., None, None]).sum(2)
    weights = (weights.view(*blocks, weights.shape[2]) * share[..., None]).sum(2)
    begins = torch.arange(0, length, queries, device=q.device)
    parts = [slice(at, at + _BLOCKS) for at in range(0, len(begins), _BLOCKS)]
    before = torch.cat(
        [_best_before(q[:, at], k.float(), weights[:, at], begins[at], topk - queries) for at in parts], dim=1
    )
    position = torch.arange(length, device=q.device)[:, None]
    own = position // queries * queries + torch.arange(queries, device=q.device)
    own = torch.where(own <= position, own, -1).expand(batch, -1, -1)
    return torch.cat([before.repeat_interleave(queries, 1)[:, :length], own], dim=2).int()


def _best_before(q: Tensor, k: Tensor, weights: Tensor, begins: Tensor, count: int) -> Tensor:
    """Return the best-scored keys before each block, `[batch, blocks, count]`, best first, -1 for none."""
    heads = F.relu(torch.einsum("bnhd,btd->bnht", q, k))
    scores = torch.einsum("bnh,bnht->bnt", weights, heads)
    seen = torch.arange(k.shape[1], device=k.device) < begins[:, None]
    best = scores.masked_fill(~seen, float("-inf")).topk(min(count, k.shape[1]), dim=-1)
    found = torch.where(best.values == float("-inf"), -1, best.indices)
    return F.pad(found, (0, count - found.shape[-1]), value=-1)
