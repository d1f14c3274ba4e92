"""Thresholded differences of keys: bits, steps, and counts by brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from indexcache_kernels import KernelInputError
from indexcache_lab.kernels.key_delta import delta_scores, differences, kept_keys, multiply_adds


def drifting(tokens: int, dim: int = 8, heads: int = 3, seed: int = 0) -> Tensor:
    """Keys `[heads, tokens, dim]` that wander, as rotated keys do."""
    steps = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(seed))
    return steps.cumsum(1) * 0.3


def by_hand(k: Tensor, threshold: float) -> tuple[Tensor, int]:
    """One number after the other, from the paper's equations."""
    kept, changes = k.clone(), 0
    for head in range(k.shape[0]):
        for number in range(k.shape[2]):
            reference = None
            for token in range(k.shape[1]):
                value = k[head, token, number]
                if reference is None or abs(value - reference) > threshold:
                    reference, changes = value, changes + 1
                kept[head, token, number] = reference
    return kept, changes


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.7, 3.0, float("inf")])
def test_kept_keys_are_the_papers(threshold: float) -> None:
    k = drifting(40)
    kept, moved = kept_keys(k, threshold)
    expected, changes = by_hand(k, threshold)
    assert torch.equal(kept, expected) and int(moved.sum()) == changes
    assert (k - kept).abs().max() <= threshold
    if not threshold:
        assert torch.equal(kept, k)
    if threshold == float("inf"):
        assert torch.equal(kept, k[:, :1].expand_as(k)) and not moved[:, 1:].any()


@pytest.mark.parametrize("cuts", [(1,), (7, 8), tuple(range(1, 40))], ids=["1", "7, 8", "each"])
def test_keys_are_kept_alike_in_one_piece_and_in_steps(cuts: tuple[int, ...]) -> None:
    k = drifting(40, seed=1)
    whole, moved = kept_keys(k, 0.6)
    before, pieces, moves = None, [], []
    for piece in k.tensor_split(cuts, dim=1):
        kept, moved_here = kept_keys(piece, 0.6, before)
        pieces.append(kept)
        moves.append(moved_here)
        before = kept[:, -1]
    assert torch.equal(torch.cat(pieces, 1), whole) and torch.equal(torch.cat(moves, 1), moved)


def test_scores_are_a_running_sum_over_differences() -> None:
    k = drifting(200, seed=2).double()
    q = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kept, moved = kept_keys(k, 0.5)
    delta = differences(kept)
    assert torch.equal(delta != 0, moved & (delta != 0)) and (delta == 0).float().mean() > 0.3
    torch.testing.assert_close(delta_scores(q, delta), q @ kept.mT, atol=1e-12, rtol=0)
    first, second = kept[:, :70], kept[:, 70:]
    assert torch.equal(torch.cat([differences(first), differences(second, first[:, -1])], 1), delta)


def test_what_is_not_a_number_is_kept() -> None:
    k = drifting(30)
    k[1, 20, 3] = torch.nan
    kept, moved = kept_keys(k, 5.0)
    assert kept[1, 20, 3].isnan() and moved[1, 20:22, 3].all() and kept.isnan().sum() == 1


def test_a_threshold_for_each_number() -> None:
    k, thresholds = drifting(30), torch.linspace(0, 2, 8)
    kept, _ = kept_keys(k, thresholds)
    for number, threshold in enumerate(thresholds.tolist()):
        assert torch.equal(kept[..., number], kept_keys(k[..., [number]], threshold)[0][..., 0])


def test_counts_are_those_of_brute_force() -> None:
    k, keys = drifting(24, seed=4), 24
    _, moved = kept_keys(k, 0.8)
    positions = torch.tensor([0, 3, 9, 22, 23])
    exact_from = torch.tensor([0, 4, 5, 0, 20])
    computed = multiply_adds(moved, positions, exact_from)
    for head in range(3):
        for query, (position, exact) in enumerate(zip(positions.tolist(), exact_from.tolist(), strict=True)):
            count = 0
            for key in range(keys):
                if key <= position:
                    count += 8 if key >= exact else int(moved[head, key].sum())
            assert computed[head, query] == count
    everything = multiply_adds(moved, positions, torch.zeros_like(positions))
    assert everything.tolist() == [[8 * (position + 1) for position in positions.tolist()]] * 3


def test_what_does_not_fit_is_refused() -> None:
    k = drifting(5)
    with pytest.raises(KernelInputError, match="threshold is -1"):
        kept_keys(k, -1.0)
    with pytest.raises(KernelInputError, match="threshold is nan"):
        kept_keys(k, float("nan"))
    with pytest.raises(KernelInputError, match=r"k is \[3, 0, 8\]"):
        kept_keys(k[:, :0], 1.0)
    for positions, exact in ((5, 0), (3, 5), (3, -1)):
        with pytest.raises(KernelInputError, match="among the 5"):
            multiply_adds(kept_keys(k, 1.0)[1], torch.tensor([positions]), torch.tensor([exact]))
