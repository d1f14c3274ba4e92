"""Plans for keys on transformers' dense models: differences, bits, windows and blocks, with their savings counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import eager_mask

from indexcache_dense.hf.pages import check_layers
from indexcache_dense.hf.patch_attention import AttentionCall, attending
from indexcache_lab.kernels.key_delta import delta_scores, differences, kept_keys, multiply_adds
from indexcache_lab.key_delta.plan import BITS_GROUP, BLOCK, SINKS, KeyPlan
from indexcache_search.errors import SearchError


class KeyDeltaCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A cache of DeltaLLM: differences of keys, values, and the last `plan.recent` keys unchanged.

    Decoding with it reads a prompt in one piece and then single tokens, inside `apply_key_plan(..., cache=cache)`.
    A layer with threshold 0 keeps its keys.
    """

    def __init__(self, plan: KeyPlan) -> None:
        if plan.method != "key_delta":
            raise SearchError(f"there is no cache for {plan.method}, expected key_delta")
        super().__init__(layers=[_DeltaLayer(threshold, plan.recent) for threshold in plan.values])


class _DeltaLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A layer with differences `[batch, G, L, D]` as `keys`, and the running pass's unchanged keys as `fresh`."""

    def __init__(self, threshold: float, recent: int) -> None:
        super().__init__()
        self.threshold, self._size = threshold, recent
        self.kept: Tensor | None = None
        self.recent: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.threshold:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        kept, _ = kept_keys(key_states, self.threshold, self.kept)
        delta = differences(kept, self.kept)
        last = key_states if self.recent is None else torch.cat([self.recent, key_states], 2)
        self.fresh, self.kept, self.recent = key_states, kept[:, :, -1], last[:, :, -self._size :]
        return super().update(delta, value_states, *args, **kwargs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _KeyState:
    """State of a pass: the arguments of `apply_key_plan`, and the counts that it yields."""

    plan: KeyPlan
    read: Tensor | None
    cache: KeyDeltaCache | None
    counts: list[Tensor]


@contextmanager
def apply_key_plan(
    model: Any, plan: KeyPlan, read: Tensor | None = None, cache: KeyDeltaCache | None = None
) -> Iterator[list[Tensor]]:
    """Run `model` with `plan` inside the `with` block, and restore it afterwards.

    Without a `cache` a pass takes whole sequences without padding, and computes for each token the result of reading or
    decoding it. Where a plan changes nothing (threshold 0, 16 bits, share 1) the outputs are those of transformers'
    eager attention bit for bit.

    Args:
        model: one of the family `dense_gqa`.
        plan: has a value for each layer.
        read: `[batch, queries]`, bool: tokens of prompts, which are read at once; by default all tokens.
        cache: the model's cache (see `cache_argument`), for actual decoding.

    Yields:
        The multiply-adds of queries with keys, `[batch, queries]`, int64, of each layer that ran; with a `cache`
        nothing is counted.

    Raises:
        SearchError: if the plan does not fit the model, or its layers can't take one.
        RuntimeError: if a plan is already applied.
    """
    layers = model.config.num_hidden_layers
    if len(plan.values) != layers:
        raise SearchError(f"the plan has values for {len(plan.values)} layers, the model has {layers}")
    check_layers(model)
    state = _KeyState(plan, read, cache, [])
    with attending(model, "indexcache_keys", partial(_attention, state), eager_mask):
        yield state.counts


def _attention(state: _KeyState, call: AttentionCall) -> Tensor:
    """Attend like transformers' eager attention, with other scores."""
    assert call.mask is not None
    score = _scores if state.cache is None else _cached_scores
    scores = score(state, call.layer, call.query, call.key, call.scaling)
    weights = F.softmax(scores + call.mask, dim=-1, dtype=torch.float32).to(call.query.dtype)
    return (weights @ _for_heads(call.value, call.query)).transpose(1, 2).contiguous()


def _for_heads(item: Tensor, query: Tensor) -> Tensor:
    """Repeat `[batch, key heads, keys, dim]` to `[batch, heads, keys, dim]`."""
    return item.repeat_interleave(query.shape[1] // item.shape[1], 1)


def _products(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    return torch.matmul(query, _for_heads(key, query).transpose(2, 3)) * scaling


def _scores(state: _KeyState, layer: int, query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return scores of whole sequences, `[batch, heads, queries, keys]`; -inf where a query does not look."""
    batch, groups, tokens, dim = key.shape
    if query.shape[2] != tokens:
        raise SearchError("a plan for keys takes whole sequences, or a cache of its own")
    plan, value, position = state.plan, state.plan.values[layer], torch.arange(tokens, device=query.device)
    scores = _products(query, key, scaling)
    if plan.method in ("sink_window", "key_blocks"):
        if plan.method == "sink_window":
            looks = (position < SINKS) | (position[:, None] - position < value)
            looks = looks.expand(batch, groups, -1, -1)
        else:
            looks = chosen_blocks(query, key, value)
        looks = looks & (position <= position[:, None])
        state.counts.append(looks.sum((1, 3)) * dim)
        return scores.masked_fill(~_for_heads(looks, query), -torch.inf)
    everything = ((position + 1) * groups * dim).expand(batch, -1)
    if value == (0 if plan.method == "key_delta" else 16):  # nothing changes
        state.counts.append(everything)
        return scores
    read = torch.ones(batch, tokens, dtype=torch.bool, device=query.device) if state.read is None else state.read
    near = exact_from(plan, read)
    if plan.method == "key_delta":
        kept, moved = kept_keys(key, value)
        counts = [multiply_adds(own, position, first).sum(0) for own, first in zip(moved, near, strict=True)]
        state.counts.append(torch.stack(counts))
    else:
        kept, near = rounded(key, int(value)), near // BITS_GROUP * BITS_GROUP  # of whole groups
        state.counts.append(everything)
    far = position < near[:, None, :, None]  # [batch, 1, queries, keys]
    return torch.where(far, _products(query, kept, scaling), scores)


def _cached_scores(state: _KeyState, layer: int, query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return scores with a cache, whose layer holds `key`."""
    assert state.cache is not None
    held: Any = state.cache.layers[layer]
    if not held.threshold:
        return _products(query, key, scaling)
    queries, keys = query.shape[2], key.shape[2]
    kept = delta_scores(query, _for_heads(key, query)) * scaling
    if queries == keys:
        near = exact_from(state.plan, torch.ones(len(query), keys, dtype=torch.bool, device=query.device))
        far = torch.arange(keys, device=query.device) < near[:, None, :, None]
        return torch.where(far, kept, _products(query, held.fresh, scaling))
    if queries > 1:
        raise SearchError("with a cache of differences a prompt is read in one piece, then a token at a time")
    last = _products(query, held.recent, scaling)
    return torch.cat([kept[..., : keys - last.shape[3]], last], -1)


def exact_from(plan: KeyPlan, read: Tensor) -> Tensor:
    """Return the first key that each query sees unchanged, `[batch, queries]`."""
    position = torch.arange(read.shape[1], device=read.device)
    squares = torch.tensor([plan.square(count) for count in read.sum(1).tolist()], device=read.device)[:, None]
    return torch.where(read, position // squares * squares, (position - plan.recent + 1).clamp_min(0))


def rounded(k: Tensor, bits: int) -> Tensor:
    """Round keys `[..., L, D]` to 2^bits steps between each number's least and largest value over 32 tokens (KIVI)."""
    tokens = k.shape[-2]
    *others, _, dim = k.shape
    last = k[..., -1:, :].expand(*others, -tokens % BITS_GROUP, dim)  # changes no range
    group = torch.cat([k, last], -2).view(*others, -1, BITS_GROUP, dim)
    low, high = group.amin(-2, keepdim=True), group.amax(-2, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    whole: Tensor = ((group - low) / step).round() * step + low
    return whole.flatten(-3, -2)[..., :tokens, :]


def chosen_blocks(query: Tensor, key: Tensor, share: float) -> Tensor:
    """Select keys by blocks for each query, future ones included: `[batch, key heads, queries, keys]`, bool.

    The first block, the query's own and the one before are always selected. Of the others those with the best mean
    keys follow, until `share` of all visible blocks is selected.
    """
    batch, kv_heads, tokens, dim = key.shape
    blocks = -(-tokens // BLOCK)
    size = torch.full((blocks,), BLOCK, device=key.device)
    size[-1] = tokens - (blocks - 1) * BLOCK
    mean = F.pad(key, (0, 0, 0, -tokens % BLOCK)).view(batch, kv_heads, blocks, BLOCK, dim).sum(3) / size[:, None]
    grouped = query.view(batch, kv_heads, -1, tokens, dim).sum(2)
    scores = grouped @ mean.mT  # [batch, key heads, queries, blocks]
    own, number = torch.arange(tokens, device=key.device)[:, None] // BLOCK, torch.arange(blocks, device=key.device)
    future, always = number > own, (number < 1) | ((number > own - 2) & (number <= own))
    scores = scores.masked_fill(future, -torch.inf).masked_fill(always, torch.inf)
    wanted = torch.ceil((own + 1) * share - 1e-6).clamp_min(3)
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    best: Tensor = rank < wanted
    return best.repeat_interleave(BLOCK, 3)[..., :tokens]
