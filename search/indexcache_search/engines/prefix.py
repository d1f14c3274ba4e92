"""Reuse of prefixes: two patterns that agree up to a layer compute the same up to it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from indexcache_kernels.patching import replaced
from indexcache_search.hf.cache_argument import cache_argument
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern


class Copy:
    """Copy of a tensor in a cache, whose memory is free again once nothing refers to the copy."""

    def __init__(self, tensor: Tensor, piece: Tensor, start: int, free: list[int]) -> None:
        self._piece, self._dtype, self._start, self._free = piece.copy_(tensor), tensor.dtype, start, free

    def to(self, device: torch.device) -> Tensor:
        """Return the tensor on a device; it may lie in the cache, so keep this copy while you use it."""
        return self._piece.to(device, self._dtype)

    def __del__(self) -> None:
        self._free.append(self._start)


@dataclass(frozen=True)
class LayerState:
    """State left by the layers below one.

    Attributes:
        output: the output of the last of them, with copies for tensors; may include the indices.
        indices: the indices it passes up, `[batch, queries, k]`, or what else its layers select.
    """

    output: Any
    indices: Copy


class PrefixCache:
    """Layer states by token batch and roles of the layers below; the oldest go first.

    A search evaluates neighbours of one pattern over and over. Its states stay, since every use renews them. All lie in
    one piece of memory, of the GPU that runs the model or of the host (`place`), to keep its heap free of gaps.

    Args:
        limit: bytes; tensors shared by several states count once. The operating system commits them as they are used.
    """

    def __init__(self, limit: float) -> None:
        self.limit = int(limit)
        self._memory, self._end = torch.empty(0, dtype=torch.uint8), 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # starts of free pieces, by size in bytes
        self._states: OrderedDict[tuple[str, str], LayerState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def longest(self, batch: str, pattern: Pattern) -> tuple[int, LayerState | None]:
        """Return how many layers can be skipped, and the state after them; renew all states below it."""
        depth = next((n for n in range(len(pattern), 0, -1) if (batch, pattern.beginning(n)) in self._states), 0)
        for below in range(1, depth + 1):
            if (batch, pattern.beginning(below)) in self._states:
                self._states.move_to_end((batch, pattern.beginning(below)))
        return depth, self._states.get((batch, pattern.beginning(depth)))

    def copy(self, tensor: Tensor) -> Copy | None:
        """Copy a tensor, int64 as int32; return `None` if no room can be made."""
        dtype = torch.int32 if tensor.dtype == torch.int64 else tensor.dtype  # indices, which fit
        size = tensor.numel() * dtype.itemsize
        room = -(-size // 64) * 64
        start = self._take(room)
        if start is None:
            return None
        if not len(self._memory):
            self._memory = torch.empty(self.limit, dtype=torch.uint8, device=place(tensor.device, self.limit))
        piece = self._memory[start : start + size].view(dtype).view(tensor.shape)
        return Copy(tensor, piece, start, self._free[room])

    def add(self, batch: str, prefix: str, state: LayerState) -> None:
        """Store the state after the layers with roles `prefix`."""
        self._states[batch, prefix] = state
        self._states.move_to_end((batch, prefix))

    def _take(self, room: int) -> int | None:
        """Return the start of a piece of `room` bytes; forget the oldest states if there is none."""
        while not self._free[room]:
            if sum(size * len(starts) for size, starts in self._free.items()) == self._end:
                self._free.clear()  # nothing is used: make room for other sizes
                self._end = 0
            if self._end + room <= self.limit:
                self._end += room
                return self._end - room
            if not self._states:
                return None
            self._states.popitem(last=False)
        return self._free[room].pop()


def place(device: torch.device, size: int) -> torch.device:
    """Return where `size` bytes of states lie: on the GPU that runs the model if that is a quarter of what is free.

    The host has more memory, but a GPU can compute a layer of a small model in the time of a copy from there.
    """
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= 4 * size:
        return device
    return torch.device("cpu")


def run_from_cache(
    model: nn.Module,
    sites: Sequence[int],
    tokens: Tensor,
    pattern: Pattern,
    *,
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
    layers = decoder.layers[: decoder.config.num_hidden_layers]
    above = [*sites[1:], len(layers)]  # the first layer that a letter does not govern
    start, state = cache.longest(batch, pattern)
    skipped, carried, output = layers[: above[start - 1] if start else 0], None, None
    if state is not None:
        carried, device = state.indices.to(tokens.device), tokens.device
        output = tree_map(
            lambda item: carried if item is state.indices else item.to(device) if isinstance(item, Copy) else item,
            state.output,
        )
    recorder = _Recorder(cache, pattern, carried, None if state is None else state.indices)
    with ExitStack() as stack:
        stack.enter_context(apply_roles(model, pattern, recorder.selected.__setitem__, carried, prompt))
        stack.enter_context(replaced(*((layer, "forward", lambda *_, **__: output) for layer in skipped)))
        for letter in range(start, len(sites) - 1):
            hook = layers[above[letter] - 1].register_forward_hook(partial(recorder.keep, letter))
            stack.enter_context(hook)
        hidden: Tensor = decoder(
            input_ids=tokens, **cache_argument(decoder, past), use_cache=past is not None
        ).last_hidden_state
    for prefix, left in recorder.states:
        cache.add(batch, prefix, left)
    return hidden, len(pattern) - start


class _Recorder:
    """Recorder of the state that each layer leaves while a pattern runs; once there is no room, it keeps no more."""

    def __init__(self, cache: PrefixCache, pattern: Pattern, carried: Tensor | None, copied: Copy | None) -> None:
        self._cache, self._pattern = cache, pattern
        self.selected: dict[int, Tensor] = {}  # by letter, filled by `apply_roles`
        self.states: list[tuple[str, LayerState]] = []
        self._indices, self._copied = carried, copied  # indices for an S layer, and their copy
        self._full = False

    def keep(self, letter: int, module: nn.Module, args: Any, output: Any) -> None:
        """Copy the state after a letter's last layer, as a forward hook."""
        if self._full:
            return
        indices = self.selected.get(letter)
        if indices is not None and indices is not self._indices:
            self._indices, self._copied = indices, self._copy(indices)
        held = tree_map(self._copy, output)
        if not self._full:
            assert self._copied is not None
            self.states.append((self._pattern.beginning(letter + 1), LayerState(held, self._copied)))

    def _copy(self, item: Any) -> Any:
        if item is self._indices:
            return self._copied
        if not isinstance(item, Tensor):
            return item
        copy = self._cache.copy(item)
        self._full |= copy is None
        return copy
