"""Layers that select by digests of keys or remember steps, behind the interfaces of flashinfer and FlashAttention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from extras.dense.tests.backend_stand_ins import (
    COMPRESSED,
    DIM,
    FEW,
    HEADS,
    LENGTHS,
    MIXED,
    Case,
    DecodeMetadata,
    FlashAttentionStandIn,
    attend,
    batch_of,
    case,
    decoded,
    flashinfer_backend,
    keep,
    model_of,
    tell,
)
from indexcache_dense.family import DENSE_GQA, flash_attention
from indexcache_dense.family.layer_pages import LayerPages
from indexcache_dense.family.sglang import LayerRole
from indexcache_dense.hf.page_selector import PageSelector, compressed_scores, rounded_scores
from indexcache_dense.reuse import ReusePolicy
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.pattern import Pattern

__all__ = ["case"]  # a fixture


POLICIES = ("none", "ema:0.7", "refresh:2")


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
@pytest.mark.parametrize("kind", ["flashinfer", pytest.param("fa3", marks=pytest.mark.slow), "fa3, pages of 16"])
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
