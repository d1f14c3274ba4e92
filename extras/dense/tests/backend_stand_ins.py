"""Stand-ins of SGLang's attention backends for dense models, a cache for them, and what they should give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_dense.family import DENSE_GQA, flashinfer
from indexcache_dense.family.layer_pages import LayerPages, budget_of
from indexcache_dense.family.sglang import LayerRole
from indexcache_dense.kernels import CachedPages, page_scores
from indexcache_dense.kernels.page_selection import naive
from indexcache_dense.selection import Selection
from sglang_indexcache.pattern import Pattern

FEW = Selection(page_tokens=8, pages=4, recent_pages=1, sink_pages=0, score="token_max")
ROOM = replace(FEW, pages=32)
COMPRESSED = Selection(page_tokens=16, pages=3, recent_pages=1, sink_pages=0, score="compressed_keys")
PATTERN, MIXED = "DDSSDS", "DFSFDS"
HEADS, GROUPS, DIM, CONTEXT = 6, 2, 16, 160
LENGTHS = (100, 31, 32, 33, 1, 150, 40)  # 32 tokens fit
SLOTS = len(LENGTHS) * CONTEXT


@dataclass
class Case:
    """A cache with keys and values of all layers, and what each layer asks."""

    layers: list[Any]
    keys: list[Tensor]
    values: list[Tensor]
    req_to_token: Tensor

    def queries(self, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(len(LENGTHS), HEADS * DIM, generator=generator) * 2 for _ in self.layers]

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.keys[layer]

    def set_kv_buffer(self, layer: Any, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[layer.layer_id][slots], self.values[layer.layer_id][slots] = k, v

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer], self.values[layer]


class RadixAttention(SimpleNamespace):
    """As far as `DenseGqaSglang.modules` looks."""


@pytest.fixture(scope="module")
def case() -> Case:
    generator = torch.Generator().manual_seed(0)
    cache = [torch.randn(SLOTS + 8, GROUPS, DIM, generator=generator) for _ in range(2 * len(PATTERN))]
    layers = [
        RadixAttention(layer_id=number, tp_q_head_num=HEADS, tp_k_head_num=GROUPS, head_dim=DIM, scaling=DIM**-0.5)
        for number in range(len(PATTERN))
    ]
    table = (torch.randperm(SLOTS // 16, generator=generator)[:, None] * 16 + torch.arange(16)).flatten()
    return Case(layers, cache[::2], cache[1::2], table.view(len(LENGTHS), -1).int())


def model_of(case: Case) -> Any:
    return SimpleNamespace(modules=lambda: case.layers)


def tell(case: Case, selection: Selection, roles: str = PATTERN) -> None:
    DENSE_GQA.sglang.switch(SimpleNamespace(model=model_of(case)), Pattern(roles, selection))


def keep(backend: Any, case: Case) -> Any:
    """Hand a backend what `DenseGqaSglang.loaded` does."""
    told = {layer.layer_id: LayerRole.of(layer) for layer in case.layers}
    backend.indexcache_pages = {
        layer: LayerPages.allocate(role.selection, case.keys[layer], len(LENGTHS), CONTEXT)
        for layer, role in told.items()
        if role is not None and role.chooses
    }
    backend.indexcache_requests = case.req_to_token
    return backend


def attend(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output `[H, D]` and natural logarithm of the denominator `[H]` of one request."""
    keys, values = (item[slots.long()].repeat_interleave(HEADS // GROUPS, dim=1) for item in (k, v))
    logits = torch.einsum("hd,lhd->hl", q.view(HEADS, DIM), keys) * scale
    return torch.einsum("hl,lhd->hd", logits.softmax(-1), values), logits.logsumexp(-1)


def reference(case: Case, queries: list[Tensor], lengths: list[int], selection: Selection) -> list[Tensor]:
    """Compute each layer's output, one request after the other, by the kernels' definitions."""
    budget, chosen = budget_of(selection), list[Tensor]()
    outputs = []
    for layer, q in zip(case.layers, queries, strict=True):
        told, rows = LayerRole.of(layer), []
        assert told is not None
        live = [case.req_to_token[row, :length] for row, length in enumerate(lengths)]
        k, v = case.get_kv_buffer(layer.layer_id)
        for row, slots in enumerate(chosen if told.role == "S" else live):
            rows.append(attend(q[row], k, v, slots, layer.scaling))
        outputs.append(torch.stack([output.flatten() for output, _ in rows]))
        if told.chooses:
            lse = torch.stack([item for _, item in rows])
            scores = page_scores(
                q.view(-1, HEADS, DIM),
                k,
                CachedPages(case.req_to_token[: len(lengths)].int(), torch.tensor(lengths, dtype=torch.int32)),
                lse=lse,
                scale=layer.scaling,
                budget=budget,
                backend="naive",
            )
            chosen = []
            for row, length in enumerate(lengths):
                size = selection.page_tokens
                pages = naive.selected(scores[row], length, budget)
                chosen.append(torch.cat([live[row][page * size : page * size + size] for page in pages]))
    return outputs


# -- flashinfer's interface, as SGLang uses it


class BatchDecodeWithPagedKVCacheWrapper:
    """flashinfer's, in PyTorch: what it reads is what was planned, or it says so."""

    def __init__(
        self,
        workspace: Any,
        layout: str,
        *,
        backend: str,
        use_tensor_cores: bool,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        self.is_cuda_graph_enabled = use_cuda_graph
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._planned = torch.empty(0)
        self.begin_forward: Any = self._plan

    def _plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *sizes: int, **kwargs: Any) -> None:
        assert "global_override_indptr_cpu" not in kwargs and len(last) == len(indptr) - 1
        if self.is_cuda_graph_enabled:
            assert indptr is self._paged_kv_indptr_buf or torch.equal(indptr, self._paged_kv_indptr_buf)
        else:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._planned = indptr.clone()

    def forward_return_lse(self, q: Tensor, cache: Any, *, sm_scale: float, **_: Any) -> tuple[Tensor, Tensor]:
        starts = self._paged_kv_indptr_buf
        assert torch.equal(self._planned, starts), "another batch was planned"
        rows = []
        for row, query in enumerate(q):
            slots = self._paged_kv_indices_buf[starts[row] : starts[row + 1]]
            rows.append(attend(query, *cache, slots, sm_scale))
        output, lse = zip(*rows, strict=True)
        return torch.stack(output), torch.stack(lse) / math.log(2)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward_return_lse(*args, **kwargs)[0]


def fast_decode_plan(wrapper: Any, *args: Any, global_override_indptr_cpu: Tensor, **kwargs: Any) -> None:
    wrapper._planned = global_override_indptr_cpu


@dataclass
class DecodeMetadata:
    decode_wrappers: list[Any]


class FlashInferStandIn:
    """Stand-in for SGLang's backend around it."""

    def __init__(self, case: Case, batch_size: int) -> None:
        self.case, self.token_to_kv_pool = case, case
        self.workspace_buffer, self.decode_backend, self.decode_use_tensor_cores = None, "fa2", True
        self.kv_indptr = [torch.zeros(batch_size + 1, dtype=torch.int32)]
        self.kv_last_page_len = torch.ones(batch_size, dtype=torch.int32)
        self.max_context_len, self.decode_split_tile_size, self.disable_cuda_graph_kv_split = CONTEXT, None, False
        self.indices_updater_decode = SimpleNamespace(
            num_qo_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM, data_type=torch.float32, q_data_type=torch.float32
        )
        self.decode_wrappers = [self._wrapper()]
        self.decode_cuda_graph_metadata: dict[int, list[Any]] = {}
        self.graph_indices = torch.zeros(batch_size * CONTEXT, dtype=torch.int32)

    def _wrapper(self, **more: Any) -> Any:
        return BatchDecodeWithPagedKVCacheWrapper(None, "NHD", backend="fa2", use_tensor_cores=True, **more)

    def _update(self, wrapper: Any, batch: Any) -> None:
        indptr = self.kv_indptr[0][: batch.batch_size + 1]
        indptr[1:] = batch.seq_lens.cumsum(0)
        parts = [self.case.req_to_token[row, :length] for row, length in enumerate(batch.seq_lens.tolist())]
        indices = torch.cat(parts)
        if wrapper.is_cuda_graph_enabled:
            self.graph_indices[: len(indices)] = indices
            indices = self.graph_indices
        more = {"global_override_indptr_cpu": indptr.clone()} if isinstance(wrapper.begin_forward, partial) else {}
        wrapper.begin_forward(indptr, indices, self.kv_last_page_len[: batch.batch_size], HEADS, GROUPS, DIM, 1, **more)

    def init_forward_metadata(self, batch: Any) -> None:
        self._update(self.decode_wrappers[0], batch)
        self.forward_metadata = DecodeMetadata(self.decode_wrappers)

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        size = batch.batch_size
        if in_capture:
            buffers = {"paged_kv_indptr_buffer": self.kv_indptr[0][: size + 1]}
            buffers["paged_kv_indices_buffer"] = self.graph_indices
            self.decode_cuda_graph_metadata[size] = [self._wrapper(use_cuda_graph=True, **buffers)]
            self.forward_metadata = DecodeMetadata(self.decode_cuda_graph_metadata[size])
        [wrapper] = self.decode_cuda_graph_metadata[size]
        self._update(wrapper, batch)
        if in_capture:
            wrapper.begin_forward = partial(fast_decode_plan, wrapper)

    def forward_extend(self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Tensor:
        return q

    def forward_decode(self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Tensor:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        [wrapper] = self.forward_metadata.decode_wrappers
        cache = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        output: Tensor = wrapper.forward(q.view(-1, HEADS, DIM), cache, sm_scale=layer.scaling, k_scale=None)
        return output.view(-1, HEADS * DIM)


# -- FlashAttention's


@dataclass
class FlashAttentionMetadata:
    page_table: Tensor
    cache_seqlens_int32: Tensor
    max_seq_len_k: int = 0
    scheduler_metadata: Any = "for all tokens"


class FlashAttentionStandIn:
    def __init__(self, case: Case, page_size: int) -> None:
        self.case, self.token_to_kv_pool, self.page_size = case, case, page_size

    def init_forward_metadata(self, batch: Any) -> None:
        table = self.case.req_to_token[:, :: self.page_size] // self.page_size
        self.forward_metadata = FlashAttentionMetadata(
            table[: batch.batch_size].contiguous(), batch.seq_lens.int(), int(batch.seq_lens.max())
        )

    def forward_extend(self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Tensor:
        return q

    def forward_decode(
        self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, return_lse: bool = False
    ) -> Any:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        metadata = self.forward_metadata
        stock = metadata.scheduler_metadata is not None
        assert stock or metadata.max_seq_len_k in (FEW.tokens, ROOM.tokens, COMPRESSED.tokens)
        assert metadata.page_table.max() < (SLOTS + 8) // self.page_size  # entries that are not live, too
        rows = []
        for row, length in enumerate(metadata.cache_seqlens_int32.tolist()):
            slots = naive.slots_of(metadata.page_table[row], self.page_size)[:length]
            rows.append(attend(q[row], *self.token_to_kv_pool.get_kv_buffer(layer.layer_id), slots, layer.scaling))
        output = torch.stack([item.flatten() for item, _ in rows])
        return (output, torch.stack([lse for _, lse in rows])) if return_lse else output


def batch_of(lengths: tuple[int, ...], host: bool = True, reads: bool = False) -> Any:
    lens = torch.tensor(lengths)
    mode = SimpleNamespace(is_decode_or_idle=lambda: not reads, is_extend=lambda: reads)
    return SimpleNamespace(
        batch_size=len(lengths),
        seq_lens=lens,
        seq_lens_cpu=lens.clone() if host else None,
        forward_mode=mode,
        req_pool_indices=torch.arange(len(lengths)),
    )


def decoded(backend: Any, case: Case, queries: list[Tensor], batch: Any) -> list[Tensor]:
    return [backend.forward_decode(q, None, None, layer, batch) for layer, q in zip(case.layers, queries, strict=True)]


def flashinfer_backend(case: Case, selection: Selection) -> Any:
    backend = flashinfer.make_backend_class(FlashInferStandIn)(case, len(LENGTHS))
    backend.indexcache_selection = selection
    return keep(backend, case)
