"""Run-time roles on transformers models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from indexcache_kernels.patching import replaced
from indexcache_kernels.transformers import INDEXER_ROPES
from indexcache_search.errors import SearchError
from indexcache_search.hf.indexers import causal, check_call, in_blocks
from sglang_indexcache import Pattern
from sglang_indexcache.families import family_of_modules
from sglang_indexcache.pattern import SHARED

Observer = Callable[[int, Tensor], None]
"""Callback with a letter and what its layer selected: indices `[batch, queries, k]`, or what the family says."""

_MARK = "_indexcache_role"


@contextmanager
def apply_roles(
    model: nn.Module,
    pattern: Pattern,
    observe: Observer | None = None,
    carried: Tensor | None = None,
    prompt: Tensor | None = None,
) -> Iterator[None]:
    """Run `model` with `pattern` inside the `with` block; restore it afterwards.

    An `F` layer's indexer runs and its indices are kept; an `S` layer's indexer returns the kept ones. Nothing else
    changes, so all-F equals the unpatched model bit for bit. A layer without an indexer (shared in the checkpoint)
    uses the indices passed up by the layer below, as in transformers. For layers that select in blocks see
    `hf.indexers`; patterns with a selection run as the model's family says (`TransformersAdapter.selecting`).

    A key/value cache filled under one pattern lacks the index keys of its `S` layers, so don't reuse it under another.

    Args:
        model: a transformers model of a family in `sglang_indexcache.families`.
        pattern: must be `S` on layers without an indexer.
        observe: called with the indices, own or reused, of every layer that has an indexer.
        carried: indices for an `S` layer before any layer selects, in a forward that skips the lower layers.
        prompt: `[batch, queries]`, bool: queries that attend to everything if there is a selection, else queries that
            may share a selection with their neighbours.

    Raises:
        PatternError: if the pattern does not fit the model.
        SearchError: if its indexers are missing, or transformers calls them with an unknown signature.
        RuntimeError: if roles are already applied to the model.
    """
    adapter = family_of_modules(model).transformers
    if pattern.dense:
        with adapter.selecting(model, pattern, observe, carried, prompt):
            yield
        return
    indexers = adapter.indexer_modules(model)
    pattern.check_fits(len(indexers), [site for site, indexer in enumerate(indexers) if indexer is None])
    kept: list[Tensor] = [] if carried is None else [carried]
    runs = _runs(model, indexers, pattern, prompt)

    def replacement(site: int, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if pattern[site] != SHARED:
                kept[:] = [run(hidden_states, *args, **kwargs)]
            indices = kept[0].to(hidden_states.device)  # layers may lie on several devices
            if observe is not None:
                observe(site, indices)
            return indices

        setattr(forward, _MARK, True)
        return forward

    changes: list[tuple[Any, str, Any]] = []
    for site, indexer in enumerate(indexers):
        if hasattr(getattr(indexer, "forward", None), _MARK):
            raise RuntimeError("roles are already applied to this model; leave the first `with` block before")
        if indexer is not None:
            changes.append((indexer, "forward", replacement(site, runs.get(site, indexer.forward))))
    with replaced(*changes):
        yield


def _runs(
    model: Any, indexers: Sequence[Any], pattern: Pattern, prompt: Tensor | None
) -> dict[int, Callable[..., Tensor]]:
    """Return, by layer, what runs in place of indexers' own `forward`: `causal` on a CPU, and selection in blocks."""
    runs: dict[int, Callable[..., Tensor]] = {}
    if model.config.model_type in INDEXER_ROPES and model.device.type == "cpu":
        own = {site: item for site, item in enumerate(indexers) if item is not None and "forward" not in vars(item)}
        runs = {site: causal(indexer, indexer.forward) for site, indexer in own.items()}
    for item in pattern.indexers:
        indexer = indexers[item.layer]
        if model.config.model_type not in INDEXER_ROPES:
            raise SearchError(f"{item}: indexers of {model.config.model_type} can't select in blocks")
        check_call(indexer)
        if prompt is None:
            raise SearchError(f"{item}: expected data with prompts, where queries may share a selection (--reply)")
        runs[item.layer] = in_blocks(indexer, runs.get(item.layer, indexer.forward), item.queries, prompt)
    return runs
