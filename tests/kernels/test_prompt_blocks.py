"""The steps of selecting for blocks: kernels are their definitions, which are what the words say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.prompt_blocks import IndexSpace, expand_blocks, lowest_last, mean_queries, naive
from tests.kernels.interpreter import DEVICE, INTERPRETED, KERNELS, poisoned

__all__ = ["poisoned"]
assert KERNELS
BACKENDS = ["naive", "triton"]
FP8 = torch.float8_e4m3fn


def rows_of(rng: random.Random, queries: int, count: int) -> tuple[Tensor, Tensor]:
    """First query and size of rows that cover a pass, in another order than that of the pass; blocks come first."""
    blocks, alone, at = [], [], 0
    while at < count:
        if rng.random() < 0.5 and at + queries <= count:
            blocks.append((at, queries))
        else:
            alone.append((at, 1))
        at += blocks[-1][1] if blocks and blocks[-1][0] == at else 1
    rng.shuffle(alone)
    first, sizes = zip(*blocks, *alone, strict=True)
    return torch.tensor(first, dtype=torch.int32, device=DEVICE), torch.tensor(sizes, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (5, 24), (32, 128)])
def test_means(backend: Any, dtype: torch.dtype, heads: int, dim: int) -> None:
    if backend == "triton" and INTERPRETED and dtype == FP8:
        pytest.skip("Triton's interpreter has no such numbers")
    torch.manual_seed(0)
    first, sizes = rows_of(random.Random(1), 4, 30)
    q = torch.randn(33, heads, dim, device=DEVICE).to(dtype)
    gates = torch.randn(33, heads, 1, device=DEVICE)
    found, found_gates = mean_queries(q, gates, first, sizes, backend=backend)
    assert found.dtype == dtype and found_gates.dtype == torch.float32
    for row, (begin, size) in enumerate(zip(first.tolist(), sizes.tolist(), strict=True)):
        wanted = q.float()[begin : begin + size].mean(0)
        if size == 1:
            assert torch.equal(found[row].float(), q[begin].float())
        else:
            step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, FP8: 2**-3}[dtype]
            torch.testing.assert_close(found[row].float(), wanted, rtol=step, atol=step / 50)
        torch.testing.assert_close(found_gates[row], gates[begin : begin + size].mean(0))
    for ranks in (3, 11):  # every n-th query, rank by rank, in rows that hold more
        order = torch.arange(33, device=DEVICE).view(-1, ranks).T.flatten()
        wider = torch.cat([gates, gates[:, :1]], 1)[order][:, :heads]
        of_ranks = q.view(torch.uint8)[order].view(dtype) if dtype == FP8 else q[order]
        again = mean_queries(of_ranks, wider, first, sizes, ranks=ranks, backend=backend)
        assert torch.equal(again[0].float(), found.float()) and torch.equal(again[1], found_gates)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("topk", [7, 64, 100])
def test_the_lowest_come_last(backend: Any, topk: int) -> None:
    """With equal scores, rows that have fewer keys than a selection, and rows that give up nothing."""
    torch.manual_seed(topk)
    rows, keys = 9, 3 * topk
    starts = torch.randint(0, 5, (rows,), dtype=torch.int32, device=DEVICE)
    scores = torch.randn(rows, keys + 5, device=DEVICE).mul(4).round()  # many are equal
    chosen = torch.stack([torch.randperm(keys, device=DEVICE)[:topk] for _ in range(rows)]).int()
    chosen[3, topk // 2 :] = -1
    counts = torch.tensor([0, 1, topk // 2, 4, topk, 2, 3, topk - 1, 0], dtype=torch.int32, device=DEVICE)
    found = lowest_last(scores[:, : keys + 5], chosen, starts, counts, backend=backend)
    for row in range(rows):
        own = chosen[row].tolist()
        score = [scores[row, key + starts[row]].item() if key >= 0 else -torch.inf for key in own]
        order = sorted(range(topk), key=lambda at: (-score[at], at))
        lowest = set(order[topk - int(counts[row]) :])
        wanted = [own[at] for at in range(topk) if at not in lowest] + [own[at] for at in sorted(lowest)]
        assert found[row].tolist() == wanted


def spaces(rows: int, rng: torch.Generator) -> list[IndexSpace]:
    """All index spaces, for rows of three requests."""
    requests = torch.randint(0, 3, (rows,), generator=rng).int().to(DEVICE)
    pages = torch.randperm(3 * 20, generator=rng).int().view(3, 20).to(DEVICE)
    offsets = torch.randint(0, 500, (rows,), generator=rng).int().to(DEVICE)
    return [IndexSpace(), IndexSpace(offsets=offsets), IndexSpace(pages=pages[:, :15], requests=requests, page_size=8)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize(("topk", "queries"), [(16, 4), (20, 20), (33, 2)])
def test_what_queries_attend_to(backend: Any, kind: int, topk: int, queries: int) -> None:
    rng = torch.Generator().manual_seed(topk)
    first, sizes = rows_of(random.Random(topk), queries, 80)
    space = spaces(len(first), rng)[kind]
    begins = torch.where(sizes > 1, first, 0)
    chosen = torch.stack([torch.randperm(100, generator=rng)[:topk] for _ in first]).int().to(DEVICE)
    chosen[-1, topk // 2 :] = -1
    result = torch.full((85, topk), 7, dtype=torch.int32, device=DEVICE)
    expand_blocks(chosen, first, sizes, begins, space, result, backend=backend)
    for row, (begin, size) in enumerate(zip(first.tolist(), sizes.tolist(), strict=True)):
        for number in range(size):
            positions = chosen[row].tolist()
            if size > 1:
                own = [begins[row].item() + other if other <= number else -1 for other in range(size)]
                positions = positions[: topk - size] + own
            wanted = torch.tensor([positions], dtype=torch.int32, device=DEVICE)
            of_row = IndexSpace(
                *(None if item is None else item[row : row + 1] for item in (space.offsets,)),
                space.pages,
                None if space.requests is None else space.requests[row : row + 1],
                space.page_size,
            )
            assert result[begin + number].tolist() == naive.translate(wanted, of_row)[0].tolist()
    assert (result[80:] == 7).all()
    for ranks, some in ((2, (0, 1)), (3, (2,)), (90, (0, 79, 80))):  # the last has no query
        for rank in some:
            own = torch.full((len(result[rank::ranks]) + 1, topk), 7, dtype=torch.int32, device=DEVICE)
            expand_blocks(chosen, first, sizes, begins, space, own, rank=rank, ranks=ranks, backend=backend)
            assert torch.equal(own[:-1], result[rank::ranks]) and (own[-1] == 7).all()


def test_what_does_not_fit_is_refused() -> None:
    first = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    q, gates = torch.zeros(4, 2, 16, device=DEVICE), torch.zeros(4, 2, 1, device=DEVICE)
    chosen = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
    for call, line in (
        (lambda: mean_queries(q, gates[..., 0], first, first), r"gates is \[4, 2\]"),
        (lambda: mean_queries(q, gates, first, first[:1]), r"sizes is \[1\] of torch.int32, expected \[2\]"),
        (lambda: mean_queries(q.mT, gates, first, first), "gates is"),
        (lambda: mean_queries(q, gates, first, first, ranks=3), "as many queries of each of 3 ranks"),
        (lambda: mean_queries(q, gates, first, first, ranks=0), "as many queries of each of 0 ranks"),
        (lambda: mean_queries(q.repeat(1, 1, 2)[..., ::2], gates, first, first), "heads of q or gates"),
        (lambda: lowest_last(q[:, 0], chosen, first, first), r"scores is \[4, 16\]"),
        (lambda: lowest_last(q[:2, 0], chosen.long(), first, first), "chosen is"),
        (lambda: expand_blocks(chosen, first, first, first, IndexSpace(), chosen[:, :4]), r"result is \[2, 4\]"),
        (lambda: expand_blocks(chosen, first, first, first.long(), IndexSpace(), chosen), "begins is"),
        (lambda: expand_blocks(chosen, first, first, first, IndexSpace(), chosen, rank=2, ranks=2), "rank is 2 of 2"),
        (lambda: mean_queries(q, gates, first, first, backend="other"), "backend is other"),  # type: ignore[arg-type]
    ):
        with pytest.raises(KernelInputError, match=line):
            call()
