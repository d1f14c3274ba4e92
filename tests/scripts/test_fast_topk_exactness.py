"""How many of the highest scores a selection leaves out."""

from __future__ import annotations

import torch

from scripts.bench.kernels.fast_topk_exactness import KINDS, left_out


def test_what_is_exact_leaves_out_nothing() -> None:
    noise = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([400, 450, 500])
    for name, kind in KINDS.items():
        scores = kind(noise)
        seen = scores.masked_fill(torch.arange(500) >= lengths[:, None], -torch.inf)
        count, above = left_out(scores, lengths, seen.topk(40, dim=1).indices.int())
        assert count.tolist() == [0, 0, 0] and above.tolist() == [0, 0, 0], name


def test_what_is_left_out_is_counted_with_its_distance() -> None:
    scores = torch.tensor([[8.0, 1.0, 4.0, 2.0, 9.0], [4.0, 4.0, 4.0, 1.0, 9.0]])
    chosen = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)  # of the second row 9 does not count
    count, above = left_out(scores, torch.tensor([5, 4]), chosen)
    assert count.tolist() == [1, 0] and above.tolist() == [0.125, 0]  # 9 was left out, the cut is 8
    count, _ = left_out(scores, torch.tensor([5, 4]), torch.tensor([[-1, -1], [-1, -1]], dtype=torch.int32))
    assert count.tolist() == [2, 2]
