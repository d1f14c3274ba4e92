"""Run-time D and S roles on transformers' dense models: some layers attend to everything, others to chosen pages.

In one causal pass every query chooses for itself, from keys that don't depend on later tokens, so a pass over a whole
sequence computes what decoding it token by token would (DELTA, arXiv 2510.09883, teacher-forced).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from indexcache_kernels import PageBudget
from indexcache_search.errors import SearchError

EVERYTHING, SHARED = "D", "S"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
_NAME = "indexcache_pages"

PageObserver = Callable[[int, Tensor], None]
"""Called with an S layer and the `[batch, queries, keys]` that its queries may look at, before causality."""


@dataclass
class _State:
    """What a pass with roles carries from layer to layer.

    Attributes:
        roles: a letter a layer.
        budget: sizes.
        dense: `[batch, queries]`, queries that attend to everything in all layers; `None` for none.
        starts: `[batch]`, where each sequence begins: what stands before is padding.
        observe: sees what S layers look at.
        kept: what was chosen last, `[batch, queries, keys]`.
    """

    roles: str
    budget: PageBudget
    dense: Tensor | None
    starts: Tensor | None
    observe: PageObserver | None
    kept: Tensor | None = None


_running: list[_State] = []


@contextmanager
def apply_page_roles(
    model: Any,
    roles: str,
    budget: PageBudget,
    dense: Tensor | None = None,
    starts: Tensor | None = None,
    observe: PageObserver | None = None,
) -> Iterator[None]:
    """Run `model` with `roles` inside the `with` block, on whole sequences without a cache; undo it afterwards.

    A `D` layer attends to everything; one that an `S` follows also chooses pages. An `S` layer attends to the pages
    that the nearest `D` before it chose, and to nothing else. With a budget that covers the context the outputs are
    those of transformers' eager attention bit for bit.

    Args:
        model: one of `ARCHITECTURES`, without sliding windows.
        roles: a letter a layer, the first one `D`.
        budget: pages and their tokens.
        dense: `[batch, queries]`, bool: queries that attend to everything, as those of a prompt do.
        starts: `[batch]`, int64: tokens of padding on the left of each sequence; pages are counted behind them.
        observe: sees what S layers may look at.

    Raises:
        SearchError: if the roles don't fit, the model is another one, or roles are already applied.
    """
    _check(model, roles)
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, eager_mask)
    _running.append(_State(roles, budget, dense, starts, observe))
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        _running.clear()


def _check(model: Any, roles: str) -> None:
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise SearchError(f"{name} takes no page roles, expected {', '.join(ARCHITECTURES)}")
    config = model.config
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise SearchError(f"{name}: sliding_window is {config.sliding_window}, expected layers that see everything")
    if len(roles) != config.num_hidden_layers:
        raise SearchError(f"pattern has {len(roles)} letters, model has {config.num_hidden_layers} layers")
    for layer, letter in enumerate(roles):
        if letter not in (EVERYTHING, SHARED):
            raise SearchError(f"pattern has {letter!r} for layer {layer}, expected D or S")
    if roles[0] != EVERYTHING:
        raise SearchError("pattern begins with S, but layer 0 has no earlier layer to share from; expected D")
    if _running:
        raise SearchError("page roles are already applied; leave the first `with` block before")


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
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if query.shape[2] != key.shape[2]:
        raise SearchError("page roles run on whole sequences, without a cache")
    if state.roles[layer] == EVERYTHING:
        output, weights = eager(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        if state.roles[layer + 1 : layer + 2] == SHARED:
            state.kept = chosen_keys(weights, state.budget, state.dense, state.starts)
        return output, weights
    assert state.kept is not None and attention_mask is not None
    if state.observe is not None:
        state.observe(layer, state.kept)
    lowest = torch.finfo(attention_mask.dtype).min
    masked = attention_mask.masked_fill(~state.kept[:, None], lowest)
    found: tuple[Tensor, Tensor | None] = eager(module, query, key, value, masked, scaling=scaling, **kwargs)
    return found


def chosen_keys(
    weights: Tensor, budget: PageBudget, dense: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """Which keys each query would attend to in the layers above, by the rule `token_max`.

    Args:
        weights: `[batch, heads, queries, keys]`, a causal layer's attention; queries and keys are the same tokens.
        budget: sizes.
        dense: as for `apply_page_roles`.
        starts: as there.

    Returns:
        `[batch, queries, keys]`, bool. Keys behind a query may be among them: causality is the mask's.
    """
    batch, _, queries, keys = weights.shape
    position = torch.arange(keys, device=weights.device).expand(batch, keys)
    if starts is not None:
        position = (position - starts[:, None]).clamp_min(0)
    page = position // budget.page_tokens  # [batch, keys]; a query's own is that of its token
    pages = int(page.max()) + 1
    shares = weights.float().amax(1)  # [batch, queries, keys]
    columns = page[:, None].expand(batch, queries, keys)
    scores = torch.zeros(batch, queries, pages, device=weights.device).scatter_add_(2, columns, shares)
    number, live = torch.arange(pages, device=weights.device), page[:, :, None] + 1  # [pages], [batch, queries, 1]
    recent = (number >= live - budget.recent_pages) & (number < live)
    sinks = number < budget.sink_pages
    open_ = (number < live - budget.recent_pages) & ~sinks
    ranked = (
        scores.masked_fill(~open_, -1.0).sort(dim=2, descending=True, stable=True).indices
    )  # ties: lower pages first
    wanted = budget.pages - budget.recent_pages - budget.sink_pages
    best = torch.zeros_like(open_).scatter_(2, ranked[:, :, :wanted], True) & open_
    kept = recent | sinks | best | (live <= budget.pages)
    if dense is not None:
        kept = kept | dense[:, :, None]
    return kept.gather(2, columns)
