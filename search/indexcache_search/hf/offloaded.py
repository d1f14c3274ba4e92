"""Decoding a dense model of transformers with most of its cache in host memory (NOSI, arXiv 2510.13602)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from indexcache_kernels import BlockBuffer, block_attention, block_scores, compress_keys, copy_blocks, swap_blocks
from indexcache_search.errors import SearchError
from indexcache_search.hf.attending import attending
from indexcache_search.hf.pages import check_layers
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE, SHARED
from sglang_indexcache.selection import CHUNK, COMPRESSED_KEYS, STRIDE

READ_AT_ONCE = 4096  # tokens of a prompt
POLICIES = ("none", "ema")


@dataclass
class _Layer:
    """Keys and values of one layer, `[B, G, tokens, D]` each.

    Attributes:
        device: of a `D` layer all of them; else the slots of the buffer, and behind them the block that is written.
        host: of the others `[B, G, blocks, block tokens, D]`, pinned where there is a CUDA device; every block that is
            full.
        ready: recorded behind what was copied beside the computation.
    """

    device: tuple[Tensor, Tensor]
    host: tuple[Tensor, Tensor] | None
    ready: torch.cuda.Event | None = None


@dataclass
class _Chooser:
    """What a layer that chooses remembers.

    Attributes:
        compressed: `[B, G, C, D]`, means of 32 keys, 16 tokens apart.
        last: `[B, G, 32, D]`, the last keys, at their position modulo 32.
        average: `[B, blocks]`, of `ema`.
        begun: `[B]`, bool: which requests it is of.
        buffer: which blocks are on the device, in its layer and those that share its choice.
    """

    compressed: Tensor
    last: Tensor
    average: Tensor
    begun: Tensor
    buffer: BlockBuffer


@dataclass
class _Step:
    """One decode step.

    Attributes:
        positions: of the new tokens, by request; `lengths` are one more, `[B]`, int32, on the device.
        full: requests whose written block was filled by the token before.
        chosen: what the nearest layer that chose wants: blocks, slots and which of these are missing, `[B, K]` each.
    """

    positions: list[int]
    lengths: Tensor
    full: list[int]
    chosen: tuple[Tensor, Tensor, Tensor] | None = None
    misses: list[Tensor] = field(default_factory=list)


_running: list[OffloadedDecoder] = []


class OffloadedDecoder:
    """A batch of requests, read densely and decoded with a plan; each has a length of its own.

    `D` layers keep all of their cache on the device. What the others hold there is a buffer of blocks for each request,
    least recently used first; blocks that `F` layers miss are copied before they attend, those of the `S` layers
    behind them meanwhile, on a stream of their own.

    Args:
        model: one of the family `dense_gqa`, in evaluation mode.
        pattern: letters with a selection by compressed keys, whose steps are `none` or `ema`, and that says how many
            pages stay on the device.
        requests: how many.
        room: tokens that a request may grow to.

    Attributes:
        lengths: tokens of each request, that of the last step included.
        misses: blocks that were brought, by layer that chooses, summed over requests and steps.

    Raises:
        PatternError: if the pattern does not fit the model.
        SearchError: if the plan can't be decoded so, or host memory does not suffice.
    """

    def __init__(self, model: Any, pattern: Pattern, requests: int, room: int) -> None:
        selection, config = pattern.selection, model.config
        pattern.check_fits(config.num_hidden_layers)
        check_layers(model)
        if selection is None or selection.score != COMPRESSED_KEYS or selection.buffer_pages is None:
            raise SearchError(f"plan {pattern.key} can't be offloaded, expected {COMPRESSED_KEYS} and buffer_pages")
        if selection.steps.policy not in POLICIES:
            raise SearchError(f"steps are {selection.steps}, expected one of {', '.join(POLICIES)}")
        self._model, self._pattern, self._selection = model, pattern, selection
        self._groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._requests, self._blocks = requests, -(-room // selection.page_tokens)
        self._check_memory()
        self._slots = selection.buffer_pages
        self._layers = [self._layer(role) for role in pattern.roles]
        sources = {pattern.source_layers[layer] for layer in pattern.shared_layers}
        choose = [n for n, role in enumerate(pattern.roles) if role not in (DENSE, SHARED) or n in sources]
        self._choosers = {layer: self._chooser() for layer in choose}
        self._copies: torch.cuda.Stream | None = None
        if model.device.type == "cuda":
            self._copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.lengths = [0] * requests
        self.misses = dict.fromkeys(choose, 0)
        self._step: _Step | None = None

    def _check_memory(self) -> None:
        """Before anything is allocated."""
        offloaded = len(self._pattern) - self._pattern.roles.count(DENSE)
        values = self._requests * self._groups * self._blocks * self._selection.page_tokens * self._dim
        need = 2 * offloaded * values * self._model.dtype.itemsize
        free = psutil.virtual_memory().available
        if need > free:
            raise SearchError(
                f"the cache of {self._requests} requests takes {need / 1e9:.1f} GB of host memory, {free / 1e9:.1f} GB"
                " are free; expected fewer requests, or more layers D"
            )

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)

    def _layer(self, role: str) -> _Layer:
        tokens = self._selection.page_tokens
        held = self._blocks if role == DENSE else self._slots + 1
        keys, values = (self._new(self._requests, self._groups, held * tokens, self._dim) for _ in range(2))
        if role == DENSE:
            return _Layer((keys, values), None)
        shape = (self._requests, self._groups, self._blocks, tokens, self._dim)
        pinned = self._model.device.type == "cuda"
        host_keys, host_values = (torch.empty(shape, dtype=self._model.dtype, pin_memory=pinned) for _ in range(2))
        return _Layer((keys, values), (host_keys, host_values))

    def _chooser(self) -> _Chooser:
        chunks = max(0, (self._blocks * self._selection.page_tokens - CHUNK) // STRIDE + 1)
        device = self._model.device
        return _Chooser(
            self._new(self._requests, self._groups, chunks, self._dim),
            self._new(self._requests, self._groups, CHUNK, self._dim),
            torch.zeros(self._requests, self._blocks, device=device),
            torch.zeros(self._requests, dtype=torch.bool, device=device),
            BlockBuffer.empty(self._requests, self._slots, device),
        )

    @torch.inference_mode()
    def read(self, request: int, tokens: Tensor) -> Tensor:
        """Read a prompt, `[tokens]`, in the place of whatever the request was; the logits behind it, `[vocabulary]`.

        Raises:
            SearchError: if it has no choice yet, or leaves no room.
        """
        length, least = len(tokens), self._selection.tokens
        if not least < length < self._blocks * self._selection.page_tokens:
            room = self._blocks * self._selection.page_tokens
            raise SearchError(f"a prompt has {length} tokens, expected more than {least} and fewer than {room}")
        past = DynamicCache(config=self._model.config)
        for part in torch.split(tokens[None], READ_AT_ONCE, 1):
            logits: Tensor = self._model(part, past_key_values=past, use_cache=True, logits_to_keep=1).logits
        self.lengths[request] = length
        for number, layer in enumerate(self._layers):
            keys, values = past.layers[number].keys[0], past.layers[number].values[0]  # [G, length, D]
            self._put(request, layer, keys, values)
            if number in self._choosers:
                self._begin(request, self._choosers[number], keys)
        return logits[0, -1]

    def _put(self, request: int, layer: _Layer, keys: Tensor, values: Tensor) -> None:
        """What was read, where it belongs: the buffer begins with the last blocks that are full."""
        size, length = self._selection.page_tokens, keys.shape[1]
        full = (length - 1) // size  # the last block is the one that is written, be it full
        if layer.host is None:
            for place, item in zip(layer.device, (keys, values), strict=True):
                place[request, :, :length] = item
            return
        first = max(0, full - self._slots)
        for place, host, item in zip(layer.device, layer.host, (keys, values), strict=True):
            host[request, :, :full].copy_(item[:, : full * size].view(len(item), full, size, -1))
            place[request, :, : (full - first) * size] = item[:, first * size : full * size]
            place[request, :, self._slots * size : self._slots * size + length - full * size] = item[:, full * size :]

    def _begin(self, request: int, chooser: _Chooser, keys: Tensor) -> None:
        size, length = self._selection.page_tokens, keys.shape[1]
        compressed = compress_keys(keys[None])[0]
        chooser.compressed[request, :, : compressed.shape[1]] = compressed
        last = torch.arange(length - CHUNK, length, device=keys.device)
        chooser.last[request, :, last % CHUNK] = keys[:, last]
        chooser.begun[request] = False
        full = (length - 1) // size
        held = torch.arange(max(0, full - self._slots), full, dtype=torch.int32, device=keys.device)
        slot = torch.arange(self._slots, dtype=torch.int32, device=keys.device)
        chooser.buffer.blocks[request] = F.pad(held, (0, self._slots - len(held)), value=-1)
        chooser.buffer.order[request] = torch.cat([slot[len(held) :], slot[: len(held)]])  # empty ones go first

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Decode the next token of every request, `[B]`: the logits behind it, `[B, vocabulary]`.

        Raises:
            SearchError: if a request was not read, or has no room.
        """
        size = self._selection.page_tokens
        if min(self.lengths) == 0 or max(self.lengths) >= self._blocks * size:
            room = self._blocks * size
            raise SearchError(f"requests have {self.lengths} tokens, expected some, and fewer than {room}")
        device = self._model.device
        lengths = torch.tensor([length + 1 for length in self.lengths], dtype=torch.int32, device=device)
        full = [request for request, length in enumerate(self.lengths) if length % size == 0]
        self._step = _Step(list(self.lengths), lengths, full)
        with self._attached():
            logits: Tensor = self._model(
                tokens[:, None],
                position_ids=(lengths - 1).long()[:, None],
                past_key_values=_PassedOn(len(self._layers)),
                use_cache=True,
            ).logits
        for layer, missed in zip(self._choosers, self._step.misses, strict=False):
            self.misses[layer] += int(missed)
        self.lengths = [length + 1 for length in self.lengths]
        return logits[:, -1]

    @contextmanager
    def _attached(self) -> Iterator[None]:
        with attending(self._model, "indexcache_offloaded", _attention, lambda *_, **__: None, _running, self):
            yield

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of the new tokens in one layer, `[B, H, D]`; `key` and `value` are theirs, `[B, G, 1, D]`."""
        step, layer, size = self._step, self._layers[number], self._selection.page_tokens
        assert step is not None
        positions = torch.tensor(step.positions, device=query.device)
        rows, lengths = torch.arange(len(positions), device=query.device), step.lengths
        chooses = number in self._choosers
        if chooses:
            self._remember(self._choosers[number], step, key[:, :, 0])
        if layer.host is None:
            for place, item in zip(layer.device, (key, value), strict=True):
                place[rows, :, positions] = item[:, :, 0]
            count = -(-max(step.positions) // size) + 1
            blocks = torch.arange(count, dtype=torch.int32, device=query.device).expand(len(rows), -1)
            blocks = torch.where(blocks * size < lengths[:, None], blocks, -1)
        else:
            if chooses:
                step.chosen = self._choose(number, query, scale)
            self._bring(layer, step, beside=False) if chooses else self._wait(layer)
            assert step.chosen is not None
            wanted, slots, _ = step.chosen
            self._keep_full(layer, step, wanted, slots)
            written = self._slots * size + positions % size
            for place, item in zip(layer.device, (key, value), strict=True):
                place[rows, :, written] = item[:, :, 0]
            tail = torch.full_like(slots[:, :1], self._slots)
            blocks, lengths = torch.cat([slots, tail], 1), (written + 1).int()
        keys, values = layer.device
        out = block_attention(query, keys, values, blocks, scale=scale, block_tokens=size, lengths=lengths)
        if chooses:
            if layer.host is None:
                step.chosen = self._choose(number, query, scale)
            self._bring_beside(number, step)
        return out

    def _remember(self, chooser: _Chooser, step: _Step, key: Tensor) -> None:
        """The new keys, `[B, G, D]`, and the compressed keys that they complete."""
        for request, position in enumerate(step.positions):
            chooser.last[request, :, position % CHUNK] = key[request]
            if position + 1 >= CHUNK and (position + 1 - CHUNK) % STRIDE == 0:
                mean = chooser.last[request].float().mean(1)
                chooser.compressed[request, :, (position + 1 - CHUNK) // STRIDE] = mean.to(key.dtype)

    def _choose(self, number: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks beside the one that is written, their slots, and which of them are missing, `[B, K]` each."""
        selection, chooser, step = self._selection, self._choosers[number], self._step
        assert step is not None
        size, device = selection.page_tokens, query.device
        scores = block_scores(query, chooser.compressed, step.lengths, scale=scale, block_tokens=size)
        scores = scores[:, : self._blocks]
        if selection.steps.policy == "ema":
            assert selection.steps.beta is not None
            averaged = selection.steps.beta * chooser.average + (1 - selection.steps.beta) * scores
            chooser.average = torch.where(chooser.begun[:, None], averaged, scores)
            chooser.begun.fill_(True)
            scores = chooser.average.clone()
        number_of = torch.arange(self._blocks, device=device)
        newest = ((step.lengths - 1) // size)[:, None]
        fixed = (number_of < selection.sink_pages) | (number_of > newest - selection.recent_pages)
        scores.masked_fill_(fixed, torch.inf).masked_fill_(number_of >= newest, -torch.inf)
        # A compressed key that touches two blocks gives both one score: the lower one goes first, as in `Chooser`.
        ranked = scores.sort(dim=1, descending=True, stable=True).indices
        wanted = ranked[:, : selection.pages - 1].sort(1).values.int()
        born = torch.full((len(wanted),), -1, dtype=torch.int32, device=device)
        if step.full:
            rows = torch.tensor(step.full, device=device)
            born[rows] = (newest[rows, 0] - 1).int()
        slots, loads = swap_blocks(wanted, born, chooser.buffer)
        step.misses.append(loads.sum())
        return wanted, slots, loads

    def _bring(self, layer: _Layer, step: _Step, beside: bool) -> None:
        """Copy what a layer is missing."""
        assert step.chosen is not None and layer.host is not None
        size = self._selection.page_tokens
        wanted, slots, loads = (item.repeat_interleave(self._groups, 0) for item in step.chosen)
        for place, host in zip(layer.device, layer.host, strict=True):
            copy_blocks(
                host.flatten(0, 1), place.view(len(host) * self._groups, -1, size, self._dim), wanted, slots, loads
            )
        if beside:
            layer.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            layer.ready.record()

    def _bring_beside(self, number: int, step: _Step) -> None:
        """Copy for the layers that share what was chosen, while others compute."""
        for layer in self._layers[number + 1 : self._end_of(number)]:
            if self._copies is None:
                self._bring(layer, step, beside=False)
                continue
            self._copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copies):
                self._bring(layer, step, beside=True)

    def _end_of(self, number: int) -> int:
        """The first layer behind those that share what layer `number` chose."""
        sources = self._pattern.source_layers
        return next((n for n in range(number + 1, len(sources)) if sources[n] != number), len(sources))

    @staticmethod
    def _wait(layer: _Layer) -> None:
        if layer.ready is not None:
            torch.cuda.current_stream().wait_event(layer.ready)

    def _keep_full(self, layer: _Layer, step: _Step, wanted: Tensor, slots: Tensor) -> None:
        """Blocks that the token before filled: into host memory, and from where they were written to their slots."""
        assert layer.host is not None
        size = self._selection.page_tokens
        for request in step.full:
            block = step.positions[request] // size - 1
            slot = slots[request][wanted[request] == block]
            for place, host in zip(layer.device, layer.host, strict=True):
                own = place[request].view(self._groups, -1, size, self._dim)  # [G, slots + 1, size, D]
                host[request, :, block].copy_(own[:, self._slots], non_blocking=True)
                own[:, slot.long()] = own[:, [self._slots]]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    [decoder] = _running
    layer: Any = module.layer_idx
    return decoder.attend(layer, query[:, :, 0].contiguous(), key, value, scaling)[:, None], None


class _PassedOn(Cache):  # type: ignore[misc]  # transformers is not typed
    """A cache that holds nothing: attention finds keys and values elsewhere."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_Nothing() for _ in range(layers)])


class _Nothing(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def generate(decoder: OffloadedDecoder, prompts: Sequence[Tensor], steps: int) -> list[list[int]]:
    """Greedy replies of `steps` tokens to prompts, one for each request of `decoder`."""
    logits = torch.stack([decoder.read(request, prompt) for request, prompt in enumerate(prompts)])
    replies: list[list[int]] = [[] for _ in prompts]
    for number in range(steps):
        tokens = logits.argmax(-1)
        for reply, token in zip(replies, tokens.tolist(), strict=True):
            reply.append(token)
        if number + 1 < steps:
            logits = decoder.step(tokens)
    return replies
