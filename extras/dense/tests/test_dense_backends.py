"""Decoding over chosen pages behind the interfaces of flashinfer and FlashAttention, which stand-ins have here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_dense.family import DENSE_GQA, backends, flash_attention, flashinfer
from indexcache_dense.family.decoding import kept_tokens
from indexcache_dense.family.layer_pages import LayerPages, budget_of
from indexcache_dense.family.sglang import CAPTURED, LayerRole
from indexcache_dense.hf.page_selector import PageSelector, compressed_scores, rounded_scores
from indexcache_dense.kernels import page_scores
from indexcache_dense.kernels.page_selection import naive
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.pattern import Pattern

FEW = Selection(page_tokens=8, pages=4, recent_pages=1, sink_pages=0, score="token_max")
ROOM = replace(FEW, pages=32)
COMPRESSED = Selection(page_tokens=16, pages=3, recent_pages=1, sink_pages=0, score="compressed_keys")
POLICIES = ("none", "ema:0.7", "refresh:2")
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
    """What `DenseGqaSglang.loaded` hands to a backend."""
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
    """What each layer gives, one request after the other, by the kernels' definitions."""
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
                case.req_to_token[: len(lengths)].int(),
                torch.tensor(lengths, dtype=torch.int32),
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
    """What SGLang's backend does around it."""

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


@pytest.mark.parametrize("selection", [FEW, ROOM])
@pytest.mark.parametrize("host", [True, False])
def test_flashinfer_without_graphs(case: Case, selection: Selection, host: bool) -> None:
    tell(case, selection)
    backend, stock = flashinfer_backend(case, selection), FlashInferStandIn(case, len(LENGTHS))
    for step in range(2):
        lengths, queries = tuple(length + step for length in LENGTHS), case.queries(step)
        batch = batch_of(lengths, host)
        for item in (backend, stock):
            item.init_forward_metadata(batch)
        found, plain = decoded(backend, case, queries, batch), decoded(stock, case, queries, batch)
        expected = reference(case, queries, list(lengths), selection)
        for layer, role in enumerate(PATTERN):
            torch.testing.assert_close(found[layer], expected[layer], rtol=1e-5, atol=1e-6)
            if role == "D" or selection is ROOM:
                assert torch.equal(found[layer], plain[layer])
            else:
                assert not torch.allclose(found[layer], plain[layer], atol=1e-3)


def test_flashinfer_plans_before_each_replay(case: Case) -> None:
    """Captured with requests of one token; the buffers and plans of a replay are those of its lengths."""
    tell(case, FEW)
    backend = flashinfer_backend(case, FEW)
    small, large = (1, 1, 1), (1,) * len(LENGTHS)
    for size in (large, small):
        batch = batch_of(size)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        decoded(backend, case, [q[: len(size)] for q in case.queries(9)], batch)
    for lengths in (LENGTHS, LENGTHS[:3], LENGTHS):
        size, queries = len(lengths), [q[: len(lengths)] for q in case.queries(len(lengths))]
        batch = batch_of(lengths)
        backend.init_forward_metadata_out_graph(batch)
        backend.forward_metadata = DecodeMetadata(backend.decode_cuda_graph_metadata[size])  # a replay needs none
        found, expected = decoded(backend, case, queries, batch), reference(case, queries, list(lengths), FEW)
        for layer in range(len(PATTERN)):
            torch.testing.assert_close(found[layer], expected[layer], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("selection", [FEW, ROOM])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_flash_attention(case: Case, selection: Selection, page_size: int) -> None:
    tell(case, selection)
    backend = keep(flash_attention.make_backend_class(FlashAttentionStandIn)(case, page_size), case)
    stock = FlashAttentionStandIn(case, page_size)
    for step in range(2):
        lengths, queries = tuple(length + step for length in LENGTHS), case.queries(step)
        batch = batch_of(lengths)
        for item in (backend, stock):
            item.init_forward_metadata(batch)
        found, plain = decoded(backend, case, queries, batch), decoded(stock, case, queries, batch)
        assert backend.forward_metadata.scheduler_metadata is not None  # put back
        expected = reference(case, queries, list(lengths), selection)
        for layer, role in enumerate(PATTERN):
            torch.testing.assert_close(found[layer], expected[layer], rtol=1e-5, atol=1e-6)
            if role == "D" or selection is ROOM:
                assert torch.equal(found[layer], plain[layer])


@dataclass
class Reference:
    """Decoding by the reference engine's rules, one request after the other, with its memory."""

    case: Case
    selectors: dict[tuple[int, int], PageSelector]

    def decode(self, queries: list[Tensor], lengths: tuple[int, ...], requests: list[int]) -> list[Tensor]:
        case, outputs, chosen = self.case, [], dict[int, Tensor]()
        for layer, q in zip(case.layers, queries, strict=True):
            told, rows = LayerRole.of(layer), []
            assert told is not None
            k, v = case.get_kv_buffer(layer.layer_id)
            for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
                live = case.req_to_token[request, :length].long()
                if told.chooses:
                    keys = k[live].transpose(0, 1)[None]
                    query = q[row].view(1, HEADS, 1, DIM)
                    rule = compressed_scores if told.selection.score == "compressed_keys" else rounded_scores
                    scores = rule(query, keys, layer.scaling, told.selection)
                    if (layer.layer_id, request) not in self.selectors:
                        self.selectors[layer.layer_id, request] = PageSelector(told.selection)
                    kept = self.selectors[layer.layer_id, request].choose(scores, length - 1)[0, 0]
                    chosen[request] = live[kept.repeat_interleave(told.selection.page_tokens)[:length]]
                rows.append(attend(q[row], k, v, live if told.role == "D" else chosen[request], layer.scaling)[0])
            outputs.append(torch.stack([output.flatten() for output in rows]))
        return outputs

    def begin(self, requests: list[int]) -> None:
        for key in [key for key in self.selectors if key[1] in requests]:
            del self.selectors[key]


@pytest.mark.parametrize("score", ["compressed_keys", "rounded_keys"])
@pytest.mark.parametrize("steps", POLICIES)
@pytest.mark.parametrize("kind", ["flashinfer", "fa3", "fa3, pages of 16"])
def test_layers_that_select_by_digests_of_keys(case: Case, kind: str, steps: str, score: Any) -> None:
    """Requests that grow over ends of groups, end, come back in another order, and begin anew in an old row."""
    selection = replace(COMPRESSED, score=score, steps=ReusePolicy.parse(steps))
    tell(case, selection, MIXED)
    if kind == "flashinfer":
        backend = flashinfer_backend(case, selection)
    else:
        page_size = 16 if "16" in kind else 1
        backend = keep(flash_attention.make_backend_class(FlashAttentionStandIn)(case, page_size), case)
    expected, lengths = Reference(case, {}), dict(enumerate((100, 31, 48, 49, 1, 127, 63)))

    def read(*requests: int) -> None:
        batch = batch_of(tuple(lengths[request] for request in requests), reads=True)
        batch.req_pool_indices = torch.tensor(requests)
        for layer in case.layers:
            assert backend.forward_extend(layer, None, None, layer, batch) is layer
        expected.begin(list(requests))

    before = case.req_to_token.clone()
    read(*lengths)
    apart = 0.0
    for step in range(7):
        if step == 3:
            del lengths[2]
            lengths = {0: lengths.pop(0), **dict(reversed(lengths.items()))}
        if step == 5:
            case.req_to_token[2] = before[2].view(-1, 16).flip(0).flatten()  # the slots of another
            lengths[2] = 90
            read(2)
        lengths = {request: length + 1 for request, length in lengths.items()}
        requests, queries = list(lengths), [q[: len(lengths)] for q in case.queries(step)]
        batch = batch_of(tuple(lengths.values()))
        batch.req_pool_indices = torch.tensor(requests)
        with rows_of(case, requests):
            backend.init_forward_metadata(batch)
            found = decoded(backend, case, queries, batch)
        reference = expected.decode(queries, tuple(lengths.values()), requests)
        for one, other in zip(found, reference, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        dense = Reference(case, {})
        tell(case, replace(selection, pages=10), MIXED)
        everything = dense.decode(queries, tuple(lengths.values()), requests)
        tell(case, selection, MIXED)
        apart = max(apart, float((found[1] - everything[1]).abs().max()))
    case.req_to_token[:] = before
    assert apart > 1e-2, "pages make no difference"


@contextmanager
def rows_of(case: Case, requests: list[int]) -> Iterator[None]:
    """The stand-ins take the table's first rows."""
    before = case.req_to_token.clone()
    case.req_to_token[: len(requests)] = before[requests]
    yield
    case.req_to_token[:] = before


def test_flashinfer_replays_with_f_layers(case: Case) -> None:
    """Captured with requests of one token, which select nothing and leave no memory."""
    selection = replace(COMPRESSED, steps=ReusePolicy.parse("refresh:2"))
    tell(case, selection, MIXED)
    backend = flashinfer_backend(case, selection)
    for size in (len(LENGTHS), 3):
        backend.init_forward_metadata_out_graph(batch := batch_of((1,) * size), in_capture=True)
        decoded(backend, case, [q[:size] for q in case.queries(9)], batch)
    assert not any(pages.steps.any() for pages in backend.indexcache_pages.values())
    batch = batch_of(LENGTHS, reads=True)
    for layer in case.layers:
        backend.forward_extend(layer, None, None, layer, batch)
    expected = Reference(case, {})
    for step, size in ((1, len(LENGTHS)), (2, 3), (3, 3)):
        lengths = tuple(length + step for length in LENGTHS[:size])
        queries = [q[:size] for q in case.queries(step)]
        backend.init_forward_metadata_out_graph(batch := batch_of(lengths))
        backend.forward_metadata = DecodeMetadata(backend.decode_cuda_graph_metadata[size])  # a replay needs none
        found = decoded(backend, case, queries, batch)
        for one, other in zip(found, expected.decode(queries, lengths, list(range(size))), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["flashinfer", "fa3"])
def test_an_f_layer_sees_the_key_of_its_own_token(case: Case, kind: str) -> None:
    """It is written before pages are scored, and once."""
    tell(case, COMPRESSED, MIXED)
    if kind == "flashinfer":
        backend = flashinfer_backend(case, COMPRESSED)
    else:
        backend = keep(flash_attention.make_backend_class(FlashAttentionStandIn)(case, 16), case)
    lengths, queries = (128,) * len(LENGTHS), case.queries(0)
    batch = batch_of(lengths, reads=True)
    for layer in case.layers:
        backend.forward_extend(layer, None, None, layer, batch)
    expected = Reference(case, {}).decode(queries, lengths, list(range(len(LENGTHS))))
    batch = batch_of(lengths)
    batch.out_cache_loc = case.req_to_token[:, 127].long()
    given = [
        (k[batch.out_cache_loc].clone(), v[batch.out_cache_loc].clone())
        for k, v in zip(case.keys, case.values, strict=True)
    ]
    for k, v in zip(case.keys, case.values, strict=True):
        k[batch.out_cache_loc] = v[batch.out_cache_loc] = torch.nan
    for kept in backend.indexcache_pages.values():
        kept.means[case.req_to_token[:, 112].long() // 16] = torch.nan
    backend.init_forward_metadata(batch)
    for layer, q, (k, v), one in zip(case.layers, queries, given, expected, strict=True):
        found = backend.forward_decode(q, k, v, layer, batch)
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)


def test_what_a_layer_keeps(case: Case) -> None:
    keys = torch.zeros(161, 2, 4, dtype=torch.bfloat16)
    kept = LayerPages.allocate(replace(COMPRESSED, steps=ReusePolicy.parse("ema:0.5")), keys, 5, 100)
    assert kept.means is not None and kept.means.shape == (11, 2, 4) and kept.means.dtype == torch.bfloat16
    assert kept.rows is not None and kept.rows.shape == (5, 7) and kept.keeps
    assert kept.nbytes == 11 * 2 * 4 * 2 + 5 * 4 + 5 * 7 * 4
    assert not LayerPages.allocate(FEW, keys, 5, 100).keeps
    tell(case, FEW)
    backend = flashinfer_backend(case, FEW)
    backend.indexcache_requests = None  # nothing is kept, so nothing is looked up
    for layer in case.layers:
        backend.forward_extend(layer, None, None, layer, batch_of(LENGTHS, reads=True))


def test_a_device_without_room_for_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(case, COMPRESSED, MIXED)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LayerPages, "allocate", full)
    pool = SimpleNamespace(req_to_token=case.req_to_token)
    runner = SimpleNamespace(model=model_of(case), req_to_token_pool=pool, token_to_kv_pool=case)
    message = "no room for what layer 1 keeps of pages; expected a smaller --mem-fraction-static"
    with pytest.raises(ProofError, match=message):
        DENSE_GQA.sglang.keep_pages(runner, Pattern(MIXED, COMPRESSED))


def test_kept_tokens_do_not_depend_on_the_choice() -> None:
    lengths = torch.tensor([1, 31, 32, 33, 40, 41, 1000])
    assert kept_tokens(lengths, FEW).tolist() == [1, 31, 32, 25, 32, 25, 32]


def test_a_layer_that_was_told_nothing(case: Case) -> None:
    backend = flashinfer_backend(case, FEW)
    with pytest.raises(ProofError, match="no role was set for layer 7"):
        backend.forward_decode(None, None, None, SimpleNamespace(layer_id=7), None)


def test_graphs_that_were_captured_with_something_else(case: Case) -> None:
    tell(case, FEW)
    letters = dict(enumerate(PATTERN))
    backend = SimpleNamespace(**{CAPTURED: {4: letters, 1: {**letters, 2: "D"}}})
    runner = SimpleNamespace(model=model_of(case), attn_backend=backend, decode_cuda_graph_runner=None)
    pattern = Pattern(PATTERN, FEW)
    DENSE_GQA.sglang.captured(runner, pattern)  # no graphs
    runner.decode_cuda_graph_runner = SimpleNamespace(capture_bs=[4])
    DENSE_GQA.sglang.captured(runner, pattern)
    for size, found in ((1, "DDDSDS"), (2, "------")):
        runner.decode_cuda_graph_runner = SimpleNamespace(capture_bs=[size, 4])
        message = f"the CUDA graph of {size} requests was captured with {found}, the pattern says {PATTERN}"
        with pytest.raises(ProofError, match=message):
            DENSE_GQA.sglang.captured(runner, pattern)


def test_backends_that_nobody_wrote_one_for() -> None:
    class Other:
        pass

    with pytest.raises(ProofError, match=r"is .*Other, expected one that can decode .* torch_native, flashinfer, fa3"):
        backends.make_backend_class(Other)
    assert {item.name for item in backends.BACKENDS} == {"torch_native", "flashinfer", "fa3"}
    made = type("Made", (), {"indexcache_stock": Other})
    assert backends.make_backend_class(made) is made


def test_places_are_of_the_pattern(case: Case) -> None:
    tell(case, FEW)
    told = [LayerRole.of(layer) for layer in case.layers]
    assert told == [
        LayerRole(role, role != "S" and above == "S", FEW) for role, above in zip(PATTERN, "DSSDS ", strict=True)
    ]
