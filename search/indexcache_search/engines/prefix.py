"""Reuse of prefixes: two patterns that agree up to a layer compute the same up to it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from indexcache_kernels.patching import replaced
from indexcache_search.hf.cache_argument import cache_argument
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern


@dataclass(frozen=True)
class LayerState:
    """State left by the layers below one: the output of the last, and the indices it passes up.

    Attributes:
        output: a tensor, or a tuple that may include the indices.
        indices: `[batch, queries, k]`, or in dense models pages `[batch, queries, pages]`.
        wide: true if the model's indices are int64; they are kept in int32.
    """

    output: Any
    indices: Tensor
    wide: bool

    def tensors(self) -> list[Tensor]:
        """List the tensors of this state."""
        output = self.output if isinstance(self.output, tuple) else (self.output,)
        return [item for item in (*output, self.indices) if isinstance(item, Tensor)]


class Slab:
    """Memory allocated once and handed out in pieces, to keep the process's heap free of gaps.

    Args:
        size: bytes; the operating system commits them as they are used.
    """

    def __init__(self, size: int) -> None:
        self.size, self._memory, self._end = size, torch.empty(0, dtype=torch.uint8), 0
        self._free: dict[int, list[int]] = {}  # starts of returned pieces, by size in bytes

    def take(self, like: Tensor) -> tuple[int, Tensor] | None:
        """Return start and tensor of a piece with the shape and dtype of `like`; `None` if there is no room."""
        if not len(self._memory):
            self._memory = torch.empty(self.size, dtype=torch.uint8)
        room = self._room(like)
        if self._free.get(room):
            start = self._free[room].pop()
        elif self._end + room <= self.size:
            start, self._end = self._end, self._end + room
        else:
            return None
        return start, self._memory[start : start + like.nbytes].view(like.dtype).view(like.shape)

    def give(self, start: int, piece: Tensor) -> None:
        """Take a piece back."""
        self._free.setdefault(self._room(piece), []).append(start)

    def clear(self) -> None:
        """Take all pieces back, to make room for other sizes."""
        self._end = 0
        self._free.clear()

    @staticmethod
    def _room(piece: Tensor) -> int:
        return -(-piece.nbytes // 64) * 64


class PrefixCache:
    """Layer states in host memory, by token batch and roles of the layers below; the oldest go first.

    A search evaluates neighbours of one pattern over and over. Its states stay, since every use renews them.

    Args:
        limit: bytes; tensors shared by several states count once.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._slab = Slab(int(limit))
        self._states: OrderedDict[tuple[str, str], LayerState] = OrderedDict()
        self._users: Counter[int] = Counter()  # number of states and runs that use a tensor, by its id
        self._starts: dict[int, int] = {}  # in the slab, by the tensor's id

    def __len__(self) -> int:
        return len(self._states)

    def longest(self, batch: str, pattern: Pattern) -> tuple[int, LayerState | None]:
        """Return how many layers can be skipped, and the state after them; renew all states below it."""
        depth = next((n for n in range(len(pattern), 0, -1) if (batch, pattern.beginning(n)) in self._states), 0)
        for below in range(1, depth + 1):
            if (batch, pattern.beginning(below)) in self._states:
                self._states.move_to_end((batch, pattern.beginning(below)))
        return depth, self._states.get((batch, pattern.beginning(depth)))

    def copy(self, tensor: Tensor) -> Tensor | None:
        """Copy a tensor to host memory until `release`; return `None` if no room can be made."""
        while True:
            copy = self._slab.take(tensor)
            if copy is not None:
                start, piece = copy
                piece.copy_(tensor)
                self._starts[id(piece)] = start
                self._users[id(piece)] = 1
                return piece
            if self._states:
                self._forget_oldest()
            elif not self._starts:
                self._slab.clear()
                if self._slab._room(tensor) > self._slab.size:
                    return None
            else:
                return None

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Hold copies for one more user."""
        for tensor in tensors:
            self._users[id(tensor)] += 1

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Release copies for one user."""
        for tensor in tensors:
            self._users[id(tensor)] -= 1
            if not self._users[id(tensor)]:
                del self._users[id(tensor)]
                self._slab.give(self._starts.pop(id(tensor)), tensor)

    def add(self, batch: str, prefix: str, state: LayerState) -> None:
        """Store the state after the layers with roles `prefix`, made of copies."""
        earlier = self._states.pop((batch, prefix), None)
        self._states[batch, prefix] = state
        self.keep(state.tensors())
        if earlier is not None:
            self.release(earlier.tensors())

    def _forget_oldest(self) -> None:
        _, oldest = self._states.popitem(last=False)
        self.release(oldest.tensors())


def run_from_cache(
    model: nn.Module,
    sites: Sequence[int],
    tokens: Tensor,
    pattern: Pattern,
    cache: PrefixCache,
    batch: str,
    prompt: Tensor | None = None,
    past: Any = None,
) -> tuple[Tensor, int]:
    """Run `tokens` with `pattern` from the deepest state in `cache`, and store the states of layers that run.

    The output equals a run of all layers bit for bit. The last layer's state is not stored, since no other pattern
    continues from it. A letter governs all layers up to the one below the next letter's.

    Args:
        model: a transformers model of a family in `sglang_indexcache.families`.
        sites: the model layer of each letter.
        tokens: `[sequences, tokens]`.
        pattern: roles.
        cache: states of earlier runs.
        batch: key of `tokens` and the pattern's selection in the cache.
        prompt: as for `apply_roles`.
        past: transformers cache with keys and values of the tokens before `tokens`.

    Returns:
        Post-norm hidden states `[sequences, tokens, hidden]`, and the number of letters that ran.
    """
    decoder: Any = model.model
    start, state = cache.longest(batch, pattern)
    pinned = [] if state is None else state.tensors()
    cache.keep(pinned)
    carried = None if state is None else _restored(state.indices, tokens.device, state.wide)
    recorder = _Recorder(cache, pattern, carried, state)
    layers = decoder.layers[: decoder.config.num_hidden_layers]
    above = [*sites[1:], len(layers)]  # the first layer that a letter does not govern
    hooks = [
        layers[above[number] - 1].register_forward_hook(
            lambda _m, _i, output, _number=number: recorder.keep(_number, output)
        )
        for number in range(start, len(sites) - 1)
    ]
    try:
        with (
            apply_roles(model, pattern, recorder.selected.__setitem__, carried, prompt),
            _replayed(layers[: above[start - 1] if start else 0], state, carried),
        ):
            output: Tensor = decoder(
                input_ids=tokens, **cache_argument(decoder, past), use_cache=past is not None
            ).last_hidden_state
        for prefix, left in recorder.states:
            cache.add(batch, prefix, left)
    finally:
        for hook in hooks:
            hook.remove()
        cache.release([*pinned, *recorder.copies])
    return output, len(pattern) - start


class _Recorder:
    """Recorder of the state that each layer leaves while a pattern runs."""

    def __init__(self, cache: PrefixCache, pattern: Pattern, carried: Tensor | None, state: LayerState | None) -> None:
        self._cache, self._pattern = cache, pattern
        self.selected: dict[int, Tensor] = {}  # by letter, filled by `apply_roles`
        self.states: list[tuple[str, LayerState]] = []
        self.copies: list[Tensor] = []
        self._latest = (carried, None if state is None else state.indices)  # indices for an S layer, and their copy
        self._full = False  # no room, since all states are in use

    def keep(self, layer: int, output: Any) -> None:
        """Copy a layer's state, as a forward hook; once there is no room, keep nothing more."""
        if self._full:
            return
        indices = self.selected.get(layer)
        if indices is not None and indices is not self._latest[0]:
            self._latest = indices, self._copy(indices.int() if indices.dtype == torch.int64 else indices)
        passed, copy = self._latest
        parts = output if isinstance(output, tuple) else (output,)
        held = tuple(
            copy if item is passed else self._copy(item) if isinstance(item, Tensor) else item for item in parts
        )
        if copy is None or any(mine is None and theirs is not None for mine, theirs in zip(held, parts, strict=True)):
            self._full = True
            return
        assert passed is not None
        whole = held if isinstance(output, tuple) else held[0]
        state = LayerState(whole, copy, passed.dtype == torch.int64)
        self.states.append((self._pattern.beginning(layer + 1), state))

    def _copy(self, tensor: Tensor) -> Tensor | None:
        copy = self._cache.copy(tensor)
        if copy is not None:
            self.copies.append(copy)
        return copy


def _restored(indices: Tensor, device: torch.device, wide: bool) -> Tensor:
    return indices.to(device, torch.int64 if wide else indices.dtype)


@contextmanager
def _replayed(layers: Sequence[nn.Module], state: LayerState | None, carried: Tensor | None) -> Iterator[None]:
    """Make `layers` return the stored output of the last one instead of computing."""
    output: Any = None
    if state is not None:
        assert carried is not None
        parts = state.output if isinstance(state.output, tuple) else (state.output,)
        moved = tuple(
            carried if item is state.indices else item.to(carried.device) if isinstance(item, Tensor) else item
            for item in parts
        )
        output = moved if isinstance(state.output, tuple) else moved[0]
    with replaced(*((layer, "forward", lambda *_, **__: output) for layer in layers)):
        yield
