"""Decoding of a dense transformers model with most of its cache in host memory (NOSI, arXiv 2510.13602)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import psutil
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from indexcache_dense.hf.page_selector import rows_a_sequence
from indexcache_dense.hf.pages import ROWS, apply_page_roles, check_layers, trained_importance
from indexcache_dense.hf.patch_attention import AttentionCall, attending
from indexcache_dense.reuse import NO_MEMORY
from indexcache_dense.selection import COMPRESSED_KEYS, JOINT, selection_in
from indexcache_lab.dense import key_heads
from indexcache_lab.kernels import BlockBuffer, block_attention
from indexcache_lab.offload.advice import selecting_layers
from indexcache_lab.offload.cached_layer import CachedLayer
from indexcache_lab.offload.chooser import Choice, Chooser
from indexcache_lab.offload.step_selector import StepSelector
from indexcache_search.errors import SearchError
from indexcache_search.hf.cache_argument import cache_argument
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE

READ_AT_ONCE = 4096  # tokens of a prompt
Prefill = Literal["dense", "sparse"]


class OffloadedDecoder:
    """Decoder of a batch of requests with a plan; each request has its own length.

    `D` layers keep all of their cache on the device. Other layers keep a buffer of blocks for each request there, and
    replace the least recently used. Blocks that `F` layers miss are copied before they attend. Blocks for the `S`
    layers behind them are copied meanwhile, on a stream of their own. With `heads: key` each key head has a buffer of
    blocks of its own.

    Args:
        model: one of the family `dense_gqa`, in evaluation mode; has trained heads if the selection asks for them.
        pattern: roles with a selection by compressed keys, and with a number of pages on the device.
        requests: number of requests.
        room: maximum tokens of a request.
        prefill: how prompts are read. `dense`: each token attends to everything. `sparse`: to pages that it selects, by
            the plan's policy if that is `none` or `nosa` (NOSA^S), else by its own scores alone.
        graph: run steps after the first one as a CUDA graph.

    Attributes:
        lengths: tokens of each request, the last step's included.

    Raises:
        PatternError: if the pattern does not fit the model.
        SearchError: if the plan is not supported, the model lacks trained heads, host memory does not suffice, or there
            is no device for a graph.
    """

    def __init__(
        self,
        model: Any,
        pattern: Pattern,
        requests: int,
        room: int,
        *,
        prefill: Prefill = "dense",
        graph: bool = False,
    ) -> None:
        selection, config = selection_in(pattern), model.config
        pattern.check_fits(config.num_hidden_layers)
        check_layers(model)
        if selection is None or selection.score != COMPRESSED_KEYS or selection.buffer_pages is None:
            raise SearchError(f"plan {pattern.key} can't be offloaded, expected {COMPRESSED_KEYS} and buffer_pages")
        if prefill not in ("dense", "sparse"):
            raise SearchError(f"prefill is {prefill!r}, expected dense or sparse")
        if graph and model.device.type != "cuda":
            raise SearchError(f"the model is on device {model.device}, expected a CUDA device for a graph")
        self._model, self._pattern, self._selection = model, pattern, selection
        self._groups, self._dim = key_heads(config)
        self._own_rows = rows_a_sequence(selection, self._groups)  # of a request
        self._trained, self._prefill = trained_importance(model, selection), prefill
        self._requests, self._blocks, self._size = requests, -(-room // selection.page_tokens), selection.page_tokens
        self._check_memory()
        self._slots = selection.buffer_pages
        self._layers = [self._layer(role) for role in pattern.roles]
        self._choosers = {layer: self._chooser(number, layer) for number, layer in enumerate(selecting_layers(pattern))}
        on_gpu = model.device.type == "cuda"
        self._copies = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.lengths = [0] * requests
        self._tokens, self._positions = torch.zeros(2, requests, dtype=torch.long, device=model.device)
        self._missed = torch.zeros(len(self._choosers), dtype=torch.long, device=model.device)
        self._rows = torch.arange(requests, device=model.device)
        self._graph, self._warm = graph, False
        self._captured: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)
        self._filled = torch.empty(0)  # blocks that the previous tokens filled, `[rows, 1]`, int32; -1 for none
        self._choice: Choice | None = None  # of the nearest selecting layer

    @property
    def misses(self) -> dict[int, int]:
        """Blocks copied to the device, by selecting layer, summed over requests and steps.

        With `heads: key` blocks of one key head, summed over key heads, too.
        """
        return dict(zip(self._choosers, self._missed.tolist(), strict=True))

    def _check_memory(self) -> None:
        """Refuse sizes beyond the host memory before anything is allocated."""
        offloaded = len(self._pattern) - self._pattern.roles.count(DENSE)
        layer = math.prod(self._host_shape) * self._model.dtype.itemsize
        if self._model.device.type == "cuda":
            layer = 1 << (layer - 1).bit_length()  # pinned memory is allocated in powers of two
        need, free = offloaded * layer, psutil.virtual_memory().available
        if need > free:
            raise SearchError(
                f"the cache of {self._requests} requests takes {need / 1e9:.1f} GB of host memory, {free / 1e9:.1f} GB"
                " are free; expected fewer requests, or more layers D"
            )

    @property
    def _host_shape(self) -> tuple[int, ...]:
        """Shape of `CachedLayer.host`."""
        return (2, self._requests, self._groups, self._blocks, self._size, self._dim)

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)

    def _layer(self, role: str) -> CachedLayer:
        blocks = self._blocks if role == DENSE else self._slots + 1
        device = self._new(2, self._requests, self._groups, blocks * self._size, self._dim)
        if role == DENSE:
            return CachedLayer(self._size, device, None)
        shape = (self._requests, self._groups, self._blocks, self._size)
        bias = torch.zeros(shape, device=self._model.device) if self._biased else None
        return CachedLayer(self._size, device, self._in_host_memory(), bias)

    @property
    def _biased(self) -> bool:
        """True if trained heads add to the scaled products."""
        if self._trained is None:
            return False
        return self._trained.bias(0, self._new(1, self._groups, 1, self._dim)) is not None

    def _in_host_memory(self) -> Tensor:
        """Allocate `CachedLayer.host`."""
        return torch.empty(self._host_shape, dtype=self._model.dtype, pin_memory=self._model.device.type == "cuda")

    def _chooser(self, number: int, layer: int) -> Chooser:
        keys = self._new(self._requests, self._groups, self._dim)
        selector = StepSelector(layer, self._selection, self._trained, keys, self._blocks)
        buffer = BlockBuffer.empty(self._requests * self._own_rows, self._slots, self._model.device)
        return Chooser(number, selector, buffer, self._own_rows, self._groups)

    @torch.inference_mode()
    def read(self, request: int, tokens: Tensor) -> Tensor:
        """Read a prompt, `[tokens]`, as a new `request`, and return the logits behind it, `[vocabulary]`.

        Raises:
            SearchError: if the prompt is too short for a selection, or leaves no room.
        """
        length, least, room = len(tokens), self._selection.tokens, self._blocks * self._size
        if not least < length < room:
            raise SearchError(f"a prompt has {length} tokens, expected more than {least} and fewer than {room}")
        past, reading = DynamicCache(config=self._model.config), self._reading()
        with reading or nullcontext():
            for part in torch.split(tokens[None], ROWS if reading else READ_AT_ONCE, 1):
                logits: Tensor = self._model(
                    part, **cache_argument(self._model, past), use_cache=True, logits_to_keep=1
                ).logits
        self.lengths[request] = length
        self._positions[request] = length
        for number, layer in enumerate(self._layers):
            keys, values = past.layers[number].keys, past.layers[number].values  # [1, G, length, D]
            layer.begin(request, torch.cat([keys, values]))
            if layer.bias is not None and self._trained is not None:
                bias = self._trained.bias(number, values)
                assert bias is not None
                layer.bias[request].flatten(1)[:, :length] = bias[0]
            if number in self._choosers:
                self._choosers[number].begin(request, keys[0], values[0], self._size)
        return logits[0, -1]

    def _reading(self) -> AbstractContextManager[None] | None:
        """Return the roles by which a prompt is read in parts of `ROWS` tokens; `None` if the model reads it alone."""
        if self._prefill == "dense" and not self._biased:
            return None
        selection = self._selection
        if selection.steps.policy != "nosa":
            selection = replace(selection, steps=NO_MEMORY)
        everything = torch.ones(1, ROWS, dtype=torch.bool, device=self._model.device)
        pattern = replace(self._pattern, selection=selection)
        return apply_page_roles(self._model, pattern, everything if self._prefill == "dense" else None)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Decode the next token of every request, `[B]`, and return the logits behind it, `[B, vocabulary]`.

        Raises:
            SearchError: if a request has no prompt, or no room.
        """
        room = self._blocks * self._size
        if min(self.lengths) == 0 or max(self.lengths) >= room:
            raise SearchError(f"requests have {self.lengths} tokens, expected some, and fewer than {room}")
        self._tokens.copy_(tokens)
        if self._graph and self._warm and self._captured is None:
            self._captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._captured):
                self._forward()
        if self._captured is not None:
            self._captured.replay()
        else:
            self._forward()  # compiles the kernels of the graph
            self._warm = True
        self.lengths = [length + 1 for length in self.lengths]
        return self._logits.clone()

    def _forward(self) -> None:
        """Run a step on tensors at fixed addresses; nothing waits for the device, so that a CUDA graph can hold it."""
        block = self._positions // self._size - 1
        filled = torch.where(self._positions % self._size == 0, block, -1).int()[:, None]
        self._filled = filled.repeat_interleave(self._own_rows, 0)
        with attending(self._model, "indexcache_offloaded", self._attend, lambda *_, **__: None):
            logits: Tensor = self._model(
                self._tokens[:, None],
                position_ids=self._positions[:, None],
                **cache_argument(self._model, PassedOn(len(self._layers))),
                use_cache=True,
            ).logits
        self._logits = logits[:, -1]
        self._positions += 1

    def _attend(self, call: AttentionCall) -> Tensor:
        """Attend in one layer, `[B, 1, H, D]`; keys and values of the call are the new tokens'."""
        query, key, value = call.query[:, :, 0].contiguous(), call.key[:, :, 0], call.value[:, :, 0]
        layer, chooser, size = self._layers[call.layer], self._choosers.get(call.layer), self._size
        positions, new = self._positions, torch.stack([key, value]).transpose(0, 1)
        if chooser is not None:
            chooser.selector.remember(positions, key, value)
        bias = None
        if layer.host is None:
            layer.device[:, self._rows, :, positions] = new
            block = torch.arange(self._blocks, dtype=torch.int32, device=query.device)
            blocks, lengths = torch.where(block * size <= positions[:, None], block, -1), positions + 1
        else:
            if chooser is not None:
                self._choice = self._choose(chooser, call, query)
                layer.copy_missing(self._choice)
            elif layer.ready is not None:
                torch.cuda.current_stream().wait_event(layer.ready)
            assert self._choice is not None
            layer.keep_filled(self._choice)
            written = self._slots * size + positions % size
            layer.device[:, self._rows, :, written] = new
            tail = torch.full_like(self._choice.slots[:, :1], self._slots)
            blocks, lengths = torch.cat([self._choice.slots, tail], 1), written + 1
            if self._selection.heads != JOINT:
                blocks = blocks.view(self._requests, self._groups, -1)
            bias = self._bias(call.layer, layer, value, self._choice)
        keys, values = layer.device
        out = block_attention(
            query,
            keys,
            values,
            blocks,
            scale=call.scaling,
            block_tokens=size,
            lengths=lengths.int(),
            bias=bias,
        )
        if chooser is not None:
            if layer.host is None:
                self._choice = self._choose(chooser, call, query)
            self._copy_for_shared(call.layer)
        return out[:, None]

    def _bias(self, number: int, layer: CachedLayer, value: Tensor, choice: Choice) -> Tensor | None:
        """Store the bias of the new values, `[B, G, D]`, and return that of the slots' tokens, `[B, G, tokens]`."""
        if layer.bias is None or self._trained is None:
            return None
        new = self._trained.bias(number, value[:, :, None])
        assert new is not None
        newest = self._positions // self._size
        layer.bias[self._rows, :, newest, self._positions % self._size] = new[:, :, 0]
        held = choice.held.clamp_min(0).view(self._requests, self._own_rows, -1).expand(-1, self._groups, -1)
        held = torch.cat([held, newest[:, None, None].expand(-1, self._groups, 1)], 2)  # [B, G, slots + 1]
        return layer.bias.gather(2, held[..., None].long().expand(-1, -1, -1, self._size)).flatten(2)

    def _choose(self, chooser: Chooser, call: AttentionCall, query: Tensor) -> Choice:
        """Select blocks beside the one being written, assign them slots in the buffer, and count those it misses."""
        choice = chooser.choose(self._requested(call.layer, query, call.scaling), self._filled)
        self._missed[chooser.number] += choice.missed
        return choice

    def _requested(self, number: int, query: Tensor, scale: float) -> Tensor:
        """Select blocks in a layer, `[rows, K]`, int32, ascending."""
        return self._choosers[number].selector.requested(self._positions, query, scale)

    def _copy_for_shared(self, number: int) -> None:
        """Copy blocks for the layers that share the selection, while others compute."""
        assert self._choice is not None
        for layer, source in zip(self._layers[number + 1 :], self._pattern.source_layers[number + 1 :], strict=True):
            if source != number:
                break
            if self._copies is None:
                layer.copy_missing(self._choice)
                continue
            self._copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copies):
                layer.copy_missing(self._choice)
                layer.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                layer.ready.record()


class PassedOn(Cache):  # type: ignore[misc]  # transformers is not typed
    """A cache that holds nothing, since attention finds keys and values elsewhere."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_Nothing() for _ in range(layers)])


class _Nothing(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states
