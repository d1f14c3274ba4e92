"""Prefix reuse: two patterns that agree up to a layer compute the same up to there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from indexcache_search.engines.roles import apply_roles
from sglang_indexcache import Pattern


def common_prefix(first: Pattern, second: Pattern) -> int:
    """Number of layers, from the first one on, in which two patterns agree."""
    for layer, (a, b) in enumerate(zip(first.roles, second.roles, strict=True)):
        if a != b:
            return layer
    return len(first)


def trunk_first(patterns: Sequence[Pattern]) -> list[Pattern]:
    """`patterns` with the one in front whose run saves the others the most layers."""
    if len(patterns) < 2:
        return list(patterns)
    saved = [sum(common_prefix(trunk, other) for other in patterns) for trunk in patterns]
    trunk = patterns[saved.index(max(saved))]
    return [trunk, *(pattern for pattern in patterns if pattern is not trunk)]


@dataclass
class LayerRun:
    """What one forward of one batch left at every layer.

    Attributes:
        pattern: the roles it ran with.
        outputs: what each decoder layer returned.
        indices: what each layer's attention selected, `[batch, queries, k]`.
    """

    pattern: Pattern
    outputs: list[Any] = field(default_factory=list)
    indices: dict[int, Tensor] = field(default_factory=dict)


def run_and_record(model: nn.Module, batch: Tensor, pattern: Pattern) -> tuple[Tensor, LayerRun]:
    """Run `batch` (`[sequences, tokens]`) in full; return post-norm hidden states and what the layers left."""
    decoder: Any = model.model
    run = LayerRun(pattern)
    hooks = [layer.register_forward_hook(lambda _m, _i, output: run.outputs.append(output)) for layer in decoder.layers]
    try:
        with apply_roles(model, pattern, run.indices.__setitem__):
            return decoder(input_ids=batch, use_cache=False).last_hidden_state, run
    finally:
        for hook in hooks:
            hook.remove()


def run_from(model: nn.Module, batch: Tensor, pattern: Pattern, earlier: LayerRun) -> Tensor:
    """Run `batch` with `pattern`, starting at the first layer whose role differs from the `earlier` run's.

    Bit for bit what a run of all layers gives: the layers left out would have computed what is recorded.
    """
    decoder: Any = model.model
    start = common_prefix(pattern, earlier.pattern)
    # Layer 0 is F in every pattern, so at least one layer is shared and its indices are there to be reused.
    carried = earlier.indices.get(pattern.source_layers[start - 1])
    with apply_roles(model, pattern, carried=carried), _replayed(decoder.layers[:start], earlier.outputs):
        output: Tensor = decoder(input_ids=batch, use_cache=False).last_hidden_state
    return output


@contextmanager
def _replayed(layers: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Let `layers` return recorded outputs instead of computing."""
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer, output in zip(layers, outputs, strict=False):
            layer.forward = lambda *_, _output=output, **__: _output
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = forward
