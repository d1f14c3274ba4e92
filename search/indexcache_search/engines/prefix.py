"""Prefix reuse: two patterns that agree up to a layer compute the same up to there."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from indexcache_search.engines.roles import apply_roles
from sglang_indexcache import Pattern


@dataclass(frozen=True)
class LayerState:
    """What the layers below one need not compute again: the last one's output, and the indices it passes up."""

    output: Any
    indices: Tensor

    def tensors(self) -> list[Tensor]:
        output = self.output if isinstance(self.output, tuple) else (self.output,)
        return [item for item in (*output, self.indices) if isinstance(item, Tensor)]


class PrefixCache:
    """Layer states in host memory, found by token batch and the roles of the layers below; the oldest go first.

    A search evaluates neighbours of one pattern over and over: its states stay, since every use renews them.

    Args:
        limit: bytes. Tensors that several states share count once.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.size = limit, 0
        self._states: OrderedDict[tuple[str, str], LayerState] = OrderedDict()
        self._users: Counter[int] = Counter()  # by tensor

    def __len__(self) -> int:
        return len(self._states)

    def longest(self, batch: str, pattern: Pattern) -> tuple[int, LayerState | None]:
        """How many layers need not run, and the state that they leave; renews all states below it."""
        depth = next((n for n in range(len(pattern), 0, -1) if (batch, pattern.roles[:n]) in self._states), 0)
        for below in range(1, depth + 1):
            if (batch, pattern.roles[:below]) in self._states:
                self._states.move_to_end((batch, pattern.roles[:below]))
        return depth, self._states.get((batch, pattern.roles[:depth]))

    def add(self, batch: str, prefix: str, state: LayerState) -> None:
        """Keep the state behind the layers with roles `prefix`."""
        self._states[batch, prefix] = state
        for tensor in state.tensors():
            if not self._users[id(tensor)]:
                self.size += tensor.nbytes
            self._users[id(tensor)] += 1
        while self.size > self.limit:
            _, oldest = self._states.popitem(last=False)
            for tensor in oldest.tensors():
                self._users[id(tensor)] -= 1
                if not self._users[id(tensor)]:
                    del self._users[id(tensor)]
                    self.size -= tensor.nbytes


def run_from_cache(
    model: nn.Module, tokens: Tensor, pattern: Pattern, cache: PrefixCache, batch: str
) -> tuple[Tensor, int]:
    """Run `tokens` with `pattern` from the deepest state in `cache`, and leave the states of the layers that ran there.

    Bit for bit what a run of all layers gives: the layers left out would have computed what is in the cache.

    Args:
        model: a transformers DSA model.
        tokens: `[sequences, tokens]`.
        pattern: roles.
        cache: states of earlier runs.
        batch: names `tokens` in the cache.

    Returns:
        Post-norm hidden states `[sequences, tokens, hidden]`, and how many layers ran.
    """
    decoder: Any = model.model
    start, state = cache.longest(batch, pattern)
    carried = None if state is None else state.indices.to(tokens.device)
    selected: dict[int, Tensor] = {}
    latest = [(carried, None if state is None else state.indices)]  # what an S layer would reuse, and its host copy
    states: list[tuple[str, LayerState]] = []

    def keep(layer: int, output: Any) -> None:
        device_copy, host_copy = latest[0]
        indices = selected.get(layer, device_copy)
        assert indices is not None  # layer 0 is F in every pattern
        if host_copy is None or indices is not device_copy:
            device_copy, host_copy = indices, indices.to("cpu")  # no copy where it is there already
            latest[0] = (device_copy, host_copy)
        parts = output if isinstance(output, tuple) else (output,)
        held = tuple(
            host_copy if item is device_copy else item.to("cpu") if isinstance(item, Tensor) else item for item in parts
        )
        left = LayerState(held if isinstance(output, tuple) else held[0], host_copy)
        states.append((pattern.roles[: layer + 1], left))

    layers = decoder.layers[: len(pattern)]
    hooks = [
        layer.register_forward_hook(lambda _m, _i, output, _number=number: keep(_number, output))
        for number, layer in enumerate(layers)
        if number >= start
    ]
    try:
        with (
            apply_roles(model, pattern, selected.__setitem__, carried),
            _replayed(layers[:start], state, tokens.device),
        ):
            output: Tensor = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    for prefix, left in states:
        cache.add(batch, prefix, left)
    return output, len(pattern) - start


@contextmanager
def _replayed(layers: Sequence[nn.Module], state: LayerState | None, device: torch.device) -> Iterator[None]:
    """Let `layers` return what the last of them returned, instead of computing; only the last one's output is used."""
    before = [layer.__dict__.get("forward") for layer in layers]
    if state is not None:
        output = state.output
        output = tuple(map(_to(device), output)) if isinstance(output, tuple) else _to(device)(output)
    try:
        for layer in layers:
            layer.forward = lambda *_, **__: output
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = forward


def _to(device: torch.device) -> Any:
    return lambda item: item.to(device) if isinstance(item, Tensor) else item
