"""Run-time roles D, F and S on transformers' dense models: some layers attend to all tokens, others to pages.

Every query of a causal pass makes its own selection, from keys that don't depend on later tokens. So one pass over a
sequence equals decoding it token by token (DELTA, arXiv 2510.09883, teacher-forced).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import eager_mask

from indexcache_dense.hf.page_selector import (
    PageSelector,
    ascending_pages,
    compressed_scores,
    importance,
    rounded_scores,
    rows_a_sequence,
    token_max_scores,
    value_norm,
)
from indexcache_dense.hf.patch_attention import Attend, AttentionCall, attending
from indexcache_dense.selection import COMPRESSED_KEYS, JOINT, TOKEN_MAX, Selection, selection_in
from indexcache_kernels import sparse_attention
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE, FULL, SHARED

ROWS = 256  # queries per block

Watcher = Callable[[int, int, Tensor], None]
"""Callback with a layer, the first query of a block, and its attention, `[batch, heads, queries, keys]`, over the keys
that its last query sees."""


class Importance(Protocol):
    """Trained importance of each token, independent of the query: a model's attribute `importance`."""

    def __call__(self, layer: int, value: Tensor) -> Tensor:
        """Return `[batch, key_heads, keys]` for a layer's values `[batch, key_heads, keys, dim]`."""
        ...

    def bias(self, layer: int, value: Tensor) -> Tensor | None:
        """Return what `attend` adds to the scaled products without gradients, in the same shape; `None` for nothing."""
        ...

    def attend(  # noqa: PLR0917
        self, layer: int, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
    ) -> Tensor:
        """Attend to the selected pages of a layer, `[batch, queries, heads, dim]`, using the importance.

        `attend` is transformers' eager attention; `mask`, `[batch, 1 or heads, queries, keys]`, is additive; `scaling`
        is the factor of the products of queries and keys.
        """
        ...


@dataclass
class _PageState:
    """State that a pass with roles carries from layer to layer; see `apply_page_roles`."""

    pattern: Pattern
    selection: Selection
    prompt: Tensor | None
    observe: Callable[[int, Tensor], None] | None
    watch: Watcher | None
    kept: Tensor | None  # the latest selection, `[rows, queries, pages]`; for rows see `hf.page_selector`
    in_blocks: bool
    importance: Importance | None
    choosers: dict[int, PageSelector] = field(default_factory=dict)  # by layer, with their memory of earlier passes

    def choose(self, layer: int, scores: Tensor, first: int, offset: int, value: Tensor) -> Tensor:
        """See `PageSelector.choose`; `first` counts queries of this pass, which follows `offset` tokens.

        The result has all pages of the pass, also for a block of queries that sees fewer.
        """
        if layer not in self.choosers or self.choosers[layer].next != offset + first:
            self.choosers[layer] = PageSelector(self.selection)
        prompt, settled = None, None
        if self.prompt is not None:
            rows = rows_a_sequence(self.selection, value.shape[1])
            prompt = self.prompt[:, first : first + scores.shape[1]].repeat_interleave(rows, 0)
        if self.selection.steps.policy == "nosa":
            settled = importance(token_importance(self.importance, layer, value, self.selection), self.selection)
        found = self.choosers[layer].choose(scores, offset + first, prompt, settled)
        return F.pad(found, (0, -(-value.shape[2] // self.selection.page_tokens) - found.shape[2]))


def token_importance(trained: Importance | None, layer: int, value: Tensor, selection: Selection) -> Tensor:
    """Return `[rows, keys]`: what no query changes about a layer's values, `[batch, key_heads, keys, dim]`.

    With trained heads their output, summed over key heads that choose together; else the norm of values.
    """
    if trained is None:
        return value_norm(value, selection)
    found = trained(layer, value)
    return found.sum(1) if selection.heads == JOINT else found.flatten(0, 1)


_in_blocks: list[None] = []


@contextmanager
def attention_in_blocks() -> Iterator[None]:
    """Keep `apply_page_roles` in the `with` block from building `[heads, queries, keys]` of all queries.

    Full attention runs in blocks of queries, and attention to pages gathers their keys
    (`indexcache_kernels.sparse_attention`). The order of sums differs from transformers', and so do the bits.
    """
    _in_blocks.append(None)
    try:
        yield
    finally:
        _in_blocks.pop()


@contextmanager
def apply_page_roles(
    model: Any,
    pattern: Pattern,
    prompt: Tensor | None = None,
    observe: Callable[[int, Tensor], None] | None = None,
    carried: Tensor | None = None,
    *,
    watch: Watcher | None = None,
) -> Iterator[None]:
    """Run `model` with `pattern` inside the `with` block, on whole sequences or their ends.

    A `D` layer attends to everything; if an `S` follows, it also selects pages. An `F` layer attends only to pages that
    it selects itself, an `S` layer only to those of the nearest `D` or `F` before it. If pages cover the context, the
    outputs equal transformers' eager attention bit for bit. Keys before an end may come from a cache.

    Args:
        model: a model of the family `dense_gqa`.
        pattern: roles with a selection.
        prompt: `[batch, queries]`, bool: prompt queries, which attend to everything.
        observe: called with each layer and its selected or reused pages `[rows, queries, pages]`, a row for each
            sequence, or with `heads: key` for each of its key heads; makes all `D` layers select.
        carried: pages for an `S` layer before any layer selects, in a forward that skips the lower layers.
        watch: called with the attention of each layer that is not shared, block by block.

    Raises:
        PatternError: if the pattern does not fit the model.
        SearchError: if the model's layers don't support it, or the model lacks the trained heads that the selection
            requires, or they meet attention in blocks.
        RuntimeError: if roles are already applied.
    """
    pattern.check_fits(model.config.num_hidden_layers)
    check_layers(model)
    selection = selection_in(pattern)
    assert selection is not None
    trained = trained_importance(model, selection)
    if trained is not None and _in_blocks:
        raise SearchError("trained heads are not known to attention in blocks, expected --engine attention=naive")
    state = _PageState(pattern, selection, prompt, observe, watch, carried, bool(_in_blocks), trained)
    with attending(model, "indexcache_pages", partial(_attention, state), eager_mask):
        yield


def trained_importance(model: Any, selection: Selection) -> Importance | None:
    """Return the trained heads of `model` if the selection asks for them.

    Raises:
        SearchError: if the model has none.
    """
    if not selection.steps.importance:
        return None
    found: Importance | None = getattr(model, "importance", None)
    if found is None:
        raise SearchError(
            "the plan asks for trained heads, and the model has none here; expected a model that was trained so, in"
            " indexcache-offload"
        )
    return found


def check_layers(model: Any) -> None:
    """Check that all layers attend to all earlier tokens.

    Raises:
        SearchError: if a sliding window limits them.
    """
    window, kinds = (getattr(model.config, key, None) for key in ("sliding_window", "layer_types"))
    if window and (kinds is None or set(kinds) != {"full_attention"}):
        name = type(model).__name__
        raise SearchError(f"{name}: sliding_window is {window}, expected layers that see everything")


def _attention(state: _PageState, call: AttentionCall) -> Tensor:
    """Run eager attention, over selected keys in F and S layers."""
    layer, query, key, value, mask = call.layer, call.query, call.key, call.value, call.mask
    role, attend, scaling = state.pattern[layer], call.eager, call.scaling
    assert mask is not None
    queries, keys, selection = query.shape[2], key.shape[2], state.selection
    rows = ROWS if state.in_blocks else queries
    following = state.pattern.roles[layer + 1 : layer + 2]
    chooses = role != SHARED and (role == FULL or following == SHARED or state.observe is not None)
    by_attention = chooses and selection.score == TOKEN_MAX
    everything = role == DENSE or by_attention
    if state.in_blocks and not everything and state.prompt is not None:
        everything = bool(state.prompt.any())  # prompts attend to everything
    outputs, chosen = [], []
    for first in range(0, queries, rows):
        block, end = slice(first, first + rows), min(keys, keys - queries + first + rows)  # later keys are not seen
        asked, seen = query[:, :, block], key[:, :, :end]
        if everything:
            output, weights = attend(asked, seen, value[:, :, :end], mask[:, :, block, :end])
            outputs.append(output)
            if state.watch is not None and role != SHARED:
                state.watch(layer, first, weights)
        if chooses:
            with torch.no_grad():
                if by_attention:
                    scores = token_max_scores(weights, selection, key.shape[1])
                else:
                    rule = compressed_scores if selection.score == COMPRESSED_KEYS else rounded_scores
                    scores = rule(asked, seen, scaling, selection)
                chosen.append(state.choose(layer, scores, first, keys - queries, value))
    if chooses:
        state.kept = torch.cat(chosen, 1)
    if state.observe is not None:
        state.observe(layer, state.kept)  # type: ignore[arg-type]  # set above or by an earlier layer
    if role == DENSE:
        return torch.cat(outputs, 1)
    assert state.kept is not None
    if state.in_blocks:
        return _over_pages(state, query, key, value, scaling, dense=torch.cat(outputs, 1) if outputs else None)
    allowed = state.kept.repeat_interleave(selection.page_tokens, dim=2)[:, :, :keys]
    by_row = allowed.view(len(query), -1, queries, keys)  # [batch, 1 or key heads, queries, keys]
    if by_row.shape[1] > 1:
        by_row = by_row.repeat_interleave(query.shape[1] // by_row.shape[1], 1)
    masked = mask.masked_fill(~by_row, torch.finfo(mask.dtype).min)
    if state.importance is None:
        return attend(query, key, value, masked)[0]
    return state.importance.attend(layer, attend, query, key, value, masked, scaling)


def _over_pages(
    state: _PageState, query: Tensor, key: Tensor, value: Tensor, scaling: float, *, dense: Tensor | None
) -> Tensor:
    """Attend to selected pages, `[batch, queries, heads, dim]`, over gathered keys; prompts take `dense`."""
    assert state.kept is not None
    output = query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[3]) if dense is None else dense
    offset = key.shape[2] - query.shape[2]
    for number, by_row in enumerate(state.kept.view(len(query), -1, *state.kept.shape[1:])):
        queries = torch.arange(by_row.shape[1], device=by_row.device)
        if state.prompt is not None:
            queries = queries[~state.prompt[number]]
        q, k, v = (item[number].transpose(0, 1) for item in (query, key, value))
        heads = q.shape[1] // len(by_row)
        for row, (keys, values) in enumerate(zip(k.chunk(len(by_row), 1), v.chunk(len(by_row), 1), strict=True)):
            own = slice(row * heads, (row + 1) * heads)
            indices = _indices(by_row[row, queries], queries + offset, state.selection)
            output[number, queries, own] = sparse_attention(q[queries, own], keys, values, indices, scaling)[0]
    return output


def _indices(kept: Tensor, position: Tensor, selection: Selection) -> Tensor:
    """Return `[queries, tokens]`, int32: tokens of `[queries, pages]` up to each query, padded with -1."""
    page = ascending_pages(kept, position, selection)[:, : selection.pages, None]
    token = page * selection.page_tokens + torch.arange(selection.page_tokens, device=kept.device)
    return token.masked_fill((page < 0) | (token > position[:, None, None]), -1).flatten(1).int()
