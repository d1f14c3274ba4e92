"""The loss of an indexer for all layers that it serves: its definition, packed, padded, and split over two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from indexcache_kernels import KernelInputError, indexer_topk
from indexcache_kernels.indexer_topk.naive import indexer_scores
from indexcache_train.distill.losses import multi_layer
from indexcache_train.kernels import LayerAttention, gather_keys, indexer_kl, indexer_loss, packed_ranges, padded_ranges
from tests.two_ranks import on_two_ranks

LENGTHS, SCALE, LAYERS, TOPK = (5, 11), 0.3, 3, 4
TOKENS = sum(LENGTHS)
ZIGZAG = torch.arange(TOKENS).view(4, -1)[[0, 3, 1, 2]].view(2, -1)  # as Megatron splits: each rank has early and late
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def made() -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Queries and keys of layers, 4 heads on 2 key heads, and the indexer's queries, keys and weights, in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layers = [(normal(TOKENS, 4, 6), normal(TOKENS, 2, 6)) for _ in range(LAYERS)]
    return layers, [item.requires_grad_() for item in (normal(TOKENS, 3, 8), normal(TOKENS, 8), normal(TOKENS, 3))]


def seen(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Which keys a query sees, `[T, T]`, written down sequence by sequence."""
    return torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()


def reference(layers: list[tuple[Tensor, Tensor]], index: list[Tensor], visible: Tensor) -> Tensor:
    """Equation 1 by `distill/losses.py`, `[T]`."""
    targets = [
        (torch.einsum("thd,lhd->htl", q, k.repeat_interleave(2, 1)) * SCALE)
        .masked_fill(~visible, -torch.inf)
        .softmax(-1)
        .mean(0)
        for q, k in layers
    ]
    return multi_layer(targets, indexer_scores(*index).masked_fill(~visible, -torch.inf).log_softmax(-1))


def given(layers: list[tuple[Tensor, Tensor]]) -> list[LayerAttention]:
    return [LayerAttention(q, k, SCALE) for q, k in layers]


def cumulative(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def selected(index: list[Tensor]) -> Tensor:
    floats = [item.detach().float() for item in index]
    starts, ends = packed_ranges(cumulative())
    return indexer_topk(*floats, starts=starts, ends=ends, topk=TOPK, backend="naive")


@pytest.mark.parametrize("sparse", [False, True])
def test_packed_sequences(sparse: bool) -> None:
    layers, index = made()
    indices, visible = (selected(index), seen()) if sparse else (None, seen())
    if indices is not None:
        visible = torch.zeros(TOKENS, TOKENS + 1).scatter(1, indices.long() % (TOKENS + 1), 1.0)[:, :-1].bool()
        assert (visible & ~seen()).sum() == 0 and visible.sum() < seen().sum()
    expected = reference(layers, index, visible).sum()
    found = indexer_loss(given(layers), *index, packed_ranges(cumulative()), indices)
    torch.testing.assert_close(found, expected, **EXACT)
    for ours, theirs in zip(torch.autograd.grad(found, index), torch.autograd.grad(expected, index), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_layers_one_after_the_other_add_up() -> None:
    layers, index = made()
    ranges = packed_ranges(cumulative())
    alone = [indexer_loss([layer], *index, ranges) / LAYERS for layer in given(layers)]
    torch.testing.assert_close(torch.stack(alone).sum(), indexer_loss(given(layers), *index, ranges), **EXACT)


def test_a_padded_batch() -> None:
    """As the same sequences packed; padding sees nothing and is seen by nothing."""
    layers, index = made()
    length = max(LENGTHS)
    mask = torch.zeros(2, length, dtype=torch.int64)
    mask[0, -LENGTHS[0] :], mask[1, : LENGTHS[1]] = 1, 1  # on the left, and none
    places = mask.flatten().nonzero()[:, 0]

    def spread(packed: Tensor) -> Tensor:
        return torch.full((2 * length, *packed.shape[1:]), 9.0, dtype=packed.dtype).index_copy(0, places, packed)

    padded = [LayerAttention(spread(q), spread(k), SCALE) for q, k in layers]
    found = indexer_loss(padded, *map(spread, index), padded_ranges(mask))
    expected = indexer_loss(given(layers), *index, packed_ranges(cumulative()))
    torch.testing.assert_close(found, expected, **EXACT)
    for ours, theirs in zip(torch.autograd.grad(found, index), torch.autograd.grad(expected, index), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    with pytest.raises(KernelInputError, match="the mask has gaps"):
        padded_ranges(torch.tensor([[1, 0, 1]]))


def shard(rank: int, sparse: bool, positions: Tensor) -> list[Tensor]:
    """A rank's loss, and the gradients of its own tokens; the attention's keys are gathered as well."""
    layers, index = made()
    own = positions[rank]
    index_q, index_k, weights = leaves = [item.detach()[own].requires_grad_() for item in index]
    parts = [LayerAttention(q[own], gather_keys(k[own], own), SCALE) for q, k in layers]
    indices = selected(index)[own] if sparse else None
    loss = indexer_loss(parts, index_q, gather_keys(index_k, own), weights, packed_ranges(cumulative(), own), indices)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("positions", [torch.arange(TOKENS).view(2, -1), ZIGZAG], ids=["in a row", "zigzag"])
def test_two_ranks_have_the_gradients_of_one(sparse: bool, positions: Tensor, tmp_path: Path) -> None:
    layers, index = made()
    loss = indexer_loss(
        given(layers), *index, packed_ranges(cumulative()), selected(index) if sparse else None, backend="naive"
    )
    expected = torch.autograd.grad(loss, index)
    ranks = on_two_ranks(shard, tmp_path, sparse, positions)
    torch.testing.assert_close(ranks[0][0] + ranks[1][0], loss, **EXACT)
    for rank, (_, *found) in enumerate(ranks):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs[positions[rank]], **EXACT)


def wrong_positions(rank: int) -> str:
    try:
        gather_keys(torch.zeros(3, 2), torch.arange(3))
    except KernelInputError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_positions_of_ranks_that_overlap_are_refused(tmp_path: Path) -> None:
    assert set(on_two_ranks(wrong_positions, tmp_path)) == {"positions of all ranks are not 0 to 5, each once"}


def test_what_does_not_fit_is_refused() -> None:
    layers, index = made()
    ranges = packed_ranges(cumulative())
    with pytest.raises(KernelInputError, match="layers is empty"):
        indexer_loss([], *index, ranges)
    with pytest.raises(KernelInputError, match=r"index_k is \[15, 8\]"):
        indexer_loss(given(layers), index[0], index[1][1:], index[2], ranges)
    with pytest.raises(KernelInputError, match=r"index_weights is .* of torch.float32, expected .* of torch.float64"):
        indexer_loss(given(layers), index[0], index[1], index[2].float(), ranges)


def test_the_kernel_needs_the_denominators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[indexer_kl.__module__], "runs_triton", lambda *_: True)
    (q, k), *_ = made()[0]
    starts, ends = packed_ranges(cumulative())
    with pytest.raises(KernelInputError, match="lse is None, expected it where the kernel runs"):
        indexer_kl(q, k, None, SCALE, *made()[1], starts, ends)
