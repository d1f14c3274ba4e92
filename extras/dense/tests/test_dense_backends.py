"""Decoding over chosen pages behind the interfaces of flashinfer and FlashAttention, which stand-ins have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from extras.dense.tests.backend_stand_ins import (
    FEW,
    LENGTHS,
    PATTERN,
    ROOM,
    Case,
    DecodeMetadata,
    FlashAttentionStandIn,
    FlashInferStandIn,
    batch_of,
    case,
    decoded,
    flashinfer_backend,
    keep,
    model_of,
    reference,
    tell,
)
from indexcache_dense.family import DENSE_GQA, backends, flash_attention
from indexcache_dense.family.decoding import kept_tokens
from indexcache_dense.family.sglang import CAPTURED, LayerRole
from indexcache_dense.selection import Selection
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.pattern import Pattern

__all__ = ["case"]  # a fixture


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
