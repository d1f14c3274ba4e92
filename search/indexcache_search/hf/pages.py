"""Run-time D, F and S roles on transformers' dense models: some layers attend to everything, others to chosen pages.

In one causal pass every query chooses for itself, from keys that don't depend on later tokens, so a pass over a whole
sequence computes what decoding it token by token would (DELTA, arXiv 2510.09883, teacher-forced).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import eager_mask

from indexcache_kernels import sparse_attention
from indexcache_search.errors import SearchError
from indexcache_search.hf.attending import attending
from sglang_indexcache import Pattern
from sglang_indexcache.families.dense_gqa import sliding_window
from sglang_indexcache.pattern import DENSE, FULL, SHARED
from sglang_indexcache.selection import Selection

ROWS = 256  # queries of a block

Watcher = Callable[[int, int, Tensor], None]
"""Called with a layer, the first query of a block, and its attention, `[batch, heads, queries, keys]`, up to the keys
that its last query sees."""


@dataclass
class _State:
    """What a pass with roles carries from layer to layer.

    Attributes:
        pattern: a letter a layer.
        prompt: `[batch, queries]`, queries that attend to everything in all layers; `None` for none.
        starts: `[batch]`, where each sequence begins: what stands before is padding.
        observe: sees what layers chose and were given.
        watch: sees the attention of layers that are not shared.
        kept: what was chosen last, `[batch, queries, pages]`.
        in_blocks: see `attention_in_blocks`.
    """

    pattern: Pattern
    prompt: Tensor | None
    starts: Tensor | None
    observe: Callable[[int, Tensor], None] | None
    watch: Watcher | None
    kept: Tensor | None
    in_blocks: bool


_running: list[_State] = []
_in_blocks: list[None] = []


@contextmanager
def attention_in_blocks() -> Iterator[None]:
    """Inside the `with` block, `apply_page_roles` makes no `[heads, queries, keys]` of all queries at once.

    Layers attend to everything in blocks of queries, and to chosen pages over keys that are gathered
    (`indexcache_kernels.sparse_attention`). Sums are in another order than transformers', so the bits differ.
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
    starts: Tensor | None = None,
    observe: Callable[[int, Tensor], None] | None = None,
    carried: Tensor | None = None,
    watch: Watcher | None = None,
) -> Iterator[None]:
    """Run `model` with `pattern` inside the `with` block, on whole sequences or their ends; undo it afterwards.

    A `D` layer attends to everything; one that an `S` follows also chooses pages. An `F` layer attends to the pages
    that it chooses itself, an `S` layer to those that the nearest `D` or `F` before it chose, and to nothing else. With
    pages that cover the context the outputs are those of transformers' eager attention bit for bit. The keys of what
    stands before an end may come from a cache.

    Args:
        model: one of the family `dense_gqa`.
        pattern: has a selection.
        prompt: `[batch, queries]`, bool: queries that attend to everything, as those of a prompt do.
        starts: `[batch]`, int64: tokens of padding on the left of each sequence; pages are counted behind them.
        observe: called with each layer and the `[batch, queries, pages]` that it chose or was given; with it, all `D`
            layers choose.
        carried: pages that an `S` layer is given before any layer chose, for a forward that skips the lower layers.
        watch: sees the attention of each layer that is not shared, block by block.

    Raises:
        PatternError: if the pattern does not fit the model.
        SearchError: if the model's layers can't take it, or there is padding where attention is in blocks.
        RuntimeError: if roles are already applied.
    """
    pattern.check_fits(model.config.num_hidden_layers)
    check_layers(model)
    if starts is not None and _in_blocks:
        raise SearchError("padding on the left is not known to attention in blocks, expected --attention naive")
    state = _State(pattern, prompt, starts, observe, watch, carried, bool(_in_blocks))
    with attending(model, "indexcache_pages", _attention, eager_mask, _running, state):
        yield


def check_layers(model: Any) -> None:
    """Check that all layers see everything before them.

    Raises:
        SearchError: naming what they see instead.
    """
    window = sliding_window(vars(model.config))
    if window:
        name = type(model).__name__
        raise SearchError(f"{name}: sliding_window is {window}, expected layers that see everything")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' eager attention, over fewer keys in S layers; `query` is `[batch, heads, queries, dim]`."""
    [state] = _running
    layer: Any = module.layer_idx
    pattern, eager = state.pattern, sys.modules[type(module).__module__].eager_attention_forward
    assert pattern.selection is not None and attention_mask is not None
    attend = partial(eager, module, scaling=scaling, **kwargs)
    blocks = _blocks(attend, query, key, value, attention_mask, ROWS if state.in_blocks else query.shape[2])
    output = None if pattern[layer] == SHARED else _dense(state, layer, blocks, key.shape[2])
    if state.observe is not None:
        state.observe(layer, state.kept)  # type: ignore[arg-type]  # chosen here, or below
    if output is not None and pattern[layer] == DENSE:
        return output, None
    assert state.kept is not None
    if state.in_blocks:
        prompts = state.prompt is not None and bool(state.prompt.any())  # which see everything
        output = torch.cat([found for _, found, _ in blocks], 1) if prompts and output is None else output
        return _over_pages(state, query, key, value, scaling, output), None
    allowed = _tokens_of(state.kept, key.shape[2], pattern.selection, state.starts)
    masked = attention_mask.masked_fill(~allowed[:, None], torch.finfo(attention_mask.dtype).min)
    return attend(query, key, value, masked)[0], None


def _dense(state: _State, layer: int, blocks: Iterator[tuple[int, Tensor, Tensor]], keys: int) -> Tensor:
    """`[batch, queries, heads, dim]`: attention to everything; what it chooses is kept where somebody wants it."""
    selection, following = state.pattern.selection, state.pattern.roles[layer + 1 : layer + 2]
    assert selection is not None
    needed = state.pattern[layer] == FULL or following == SHARED or state.observe is not None
    outputs, chosen = [], []
    for first, output, weights in blocks:
        outputs.append(output)
        if state.watch is not None:
            state.watch(layer, first, weights)
        if needed:
            prompt = None if state.prompt is None else state.prompt[:, first : first + weights.shape[2]]
            pages = chosen_pages(weights, selection, prompt, state.starts)
            whole = -(-keys // selection.page_tokens) if state.in_blocks else pages.shape[2]
            chosen.append(F.pad(pages, (0, whole - pages.shape[2])))
    if needed:
        state.kept = torch.cat(chosen, 1)
    return torch.cat(outputs, 1)


def _blocks(
    attend: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor, mask: Tensor, size: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Attention to everything: a block's first query, its output `[batch, queries, heads, dim]`, and its attention."""
    queries, keys = query.shape[2], key.shape[2]
    for first in range(0, queries, size):
        rows, end = slice(first, first + size), min(keys, keys - queries + first + size)  # later keys are not seen
        yield first, *attend(query[:, :, rows], key[:, :, :end], value[:, :, :end], mask[:, :, rows, :end])


def _over_pages(
    state: _State, query: Tensor, key: Tensor, value: Tensor, scaling: float, dense: Tensor | None
) -> Tensor:
    """`[batch, queries, heads, dim]`: attention to chosen pages over gathered keys; of prompts what `dense` has."""
    assert state.kept is not None and state.pattern.selection is not None
    output = query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[3]) if dense is None else dense
    offset = key.shape[2] - query.shape[2]
    for number, kept in enumerate(state.kept):
        rows = torch.arange(len(kept), device=kept.device)
        if state.prompt is not None:
            rows = rows[~state.prompt[number]]
        indices = _indices(kept[rows], rows + offset, state.pattern.selection)
        q, k, v = (item[number].transpose(0, 1) for item in (query, key, value))
        output[number, rows] = sparse_attention(q[rows], k, v, indices, scaling)[0]
    return output


def _indices(kept: Tensor, position: Tensor, selection: Selection) -> Tensor:
    """`[queries, tokens]`, int32: tokens of the pages `[queries, pages]`, up to each query's own; -1 behind them."""
    number = torch.arange(kept.shape[1], device=kept.device)
    live = kept & (number <= position[:, None] // selection.page_tokens)
    most = min(selection.pages, kept.shape[1])
    page = torch.where(live, number, kept.shape[1]).sort(dim=1).values[:, :most]
    token = page[:, :, None] * selection.page_tokens + torch.arange(selection.page_tokens, device=kept.device)
    return token.masked_fill(token > position[:, None, None], -1).flatten(1).int()


def chosen_pages(
    weights: Tensor, selection: Selection, prompt: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """Which pages each query gives to the layers above, by the rule `token_max`.

    Args:
        weights: `[batch, heads, queries, keys]`, a causal layer's attention; the queries are of the last tokens.
        selection: how many pages.
        prompt: as for `apply_page_roles`.
        starts: likewise.

    Returns:
        `[batch, queries, pages]`, bool. Tokens behind a query may be among them: causality is the mask's.
    """
    queries, keys = weights.shape[2:]
    shares = weights.float().amax(1)  # [batch, queries, keys]
    page = _page_of(keys, selection, starts, weights)
    if starts is None:
        whole = F.pad(shares, (0, -keys % selection.page_tokens))
        scores = whole.view(*shares.shape[:2], -1, selection.page_tokens).sum(3)
    else:
        scores = torch.zeros(*shares.shape[:2], int(page.max()) + 1, device=weights.device)
        scores.scatter_add_(2, page[:, None].expand_as(shares), shares)
    number, live = torch.arange(scores.shape[2], device=weights.device), page[:, -queries:, None] + 1
    recent = (number >= live - selection.recent_pages) & (number < live)
    sinks = number < selection.sink_pages
    open_ = (number < live - selection.recent_pages) & ~sinks
    ranked = scores.masked_fill_(~open_, -1.0).sort(dim=2, descending=True, stable=True).indices  # ties: the lower page
    wanted = selection.pages - selection.recent_pages - selection.sink_pages
    best = torch.zeros_like(open_).scatter_(2, ranked[:, :, :wanted], True) & open_
    kept = recent | sinks | best | (live <= selection.pages)
    return kept if prompt is None else kept | prompt[:, :, None]


def _page_of(keys: int, selection: Selection, starts: Tensor | None, like: Tensor) -> Tensor:
    """`[batch, keys]`, int64: the page of each token, counted from where its sequence begins."""
    position = torch.arange(keys, device=like.device).expand(len(like), -1)
    if starts is not None:
        position = (position - starts[:, None]).clamp_min(0)
    return position // selection.page_tokens


def _tokens_of(kept: Tensor, keys: int, selection: Selection, starts: Tensor | None) -> Tensor:
    """`[batch, queries, keys]`, bool: the tokens of pages `[batch, queries, pages]`."""
    if starts is None:
        return kept.repeat_interleave(selection.page_tokens, dim=2)[:, :, :keys]
    page = _page_of(keys, selection, starts, kept)
    return kept.gather(2, page[:, None].expand(-1, kept.shape[1], -1))
