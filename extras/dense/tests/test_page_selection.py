"""Page scores and selection against their definitions; under Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_dense.hf.page_selector import PageSelector
from indexcache_dense.kernels import CachedPages, PageBudget, StepMemory, page_scores, select_pages
from indexcache_dense.kernels.page_selection import naive
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from indexcache_kernels import KernelInputError
from indexcache_kernels.backends import Backend
from tests.kernels.interpreter import DEVICE, INTERPRETED, LARGE, poisoned

__all__ = ["poisoned"]  # a fixture of every test here


BOTH: tuple[Backend, ...] = ("naive", "triton")
SHAPES = [(1, 16, 9, 3, 64), (16, 16, 28, 4, 128), (4, 16, 8, 8, 80), (64, 64, 32, 8, 128), (1, 128, 3, 3, 128)]


def cache(lengths: list[int], width: int, table_page: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """Queries, keys in shuffled pages, and the denominators of their attention."""
    generator = torch.Generator().manual_seed(sum(lengths) + table_page)
    rows = len(lengths)
    k = torch.randn(rows * width, kv_heads, dim, generator=generator).to(DEVICE)
    q = (torch.randn(rows, heads, dim, generator=generator) * 2).to(DEVICE)
    table = torch.randperm(rows * width // table_page, generator=generator).view(rows, -1).int().to(DEVICE)
    lse = torch.stack(
        [attention(q, k, table, row, length, table_page).logsumexp(1) for row, length in enumerate(lengths)]
    )
    pages = CachedPages(table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), table_page)
    return {"q": q, "k": k, "pages": pages, "lse": lse, "scale": dim**-0.5}


def attention(q: Tensor, k: Tensor, table: Tensor, row: int, length: int, table_page: int) -> Tensor:
    """Logits `[H, L]` of one request."""
    keys = k[naive.slots_of(table[row], table_page)[:length]].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("hd,lhd->hl", q[row], keys) * q.shape[2] ** -0.5


def test_the_definition_is_the_papers_rule() -> None:
    """Softmax over the tokens, the largest over the heads, the sum over a page."""
    given = cache([70], 80, 1, 4, 2, 16)
    shares = attention(given["q"], given["k"], given["pages"].table, 0, 70, 1).softmax(1).amax(0)
    expected = torch.stack([part.sum() for part in shares.split(16)])
    budget = PageBudget(pages=4, recent_pages=1)
    torch.testing.assert_close(page_scores(**given, budget=budget, backend="naive")[0], expected)


@pytest.mark.parametrize(("table_page", "page_tokens", "heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(
    "lengths",
    [[129, 513, 64], pytest.param([1, 700, 1024], marks=LARGE), pytest.param([1023, 383, 384], marks=LARGE)],
)
def test_kernels_are_their_definitions(
    table_page: int, page_tokens: int, heads: int, kv_heads: int, dim: int, lengths: list[int]
) -> None:
    pages = max(6, 96 // page_tokens * 2) if page_tokens < 128 else 4
    budget = PageBudget(page_tokens, pages=pages, recent_pages=2, sink_pages=1)
    given = cache(lengths, 1024, table_page, heads, kv_heads, dim)
    expected = page_scores(**given, budget=budget, backend="naive")
    found = [page_scores(**given, budget=budget, backend="triton", splits=splits) for splits in (1, 3, 16)]
    for row, length in enumerate(lengths):
        live = -(-length // page_tokens)
        if live > budget.pages:
            torch.testing.assert_close(found[0][row, :live], expected[row, :live], rtol=2e-5, atol=1e-6)
        else:
            live = 0
        assert found[0][row, live:].isnan().all()  # nothing else is written
        assert all(torch.equal(one[row, :live], found[0][row, :live]) for one in found), "scores depend on splits"
    table, lens = {}, {}
    for backend in ("naive", "triton"):
        table[backend], lens[backend] = select_pages(expected, given["pages"], budget=budget, backend=backend)
    assert torch.equal(lens["naive"], lens["triton"])
    assert torch.equal(table["naive"], table["triton"])  # what is not written included
    for row, length in enumerate(lengths):
        tokens = min(-(-length // page_tokens), budget.pages) * page_tokens - (-length % page_tokens)
        assert lens["naive"][row] == tokens
        kept = table["naive"][row, : -(-tokens // table_page)].tolist()
        own = given["pages"].table[row].tolist()
        order = [own.index(entry) for entry in kept]
        assert order == sorted(set(order)) and order[0] == 0 and order[-1] == (length - 1) // table_page


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("table_page", [1, 16])
def test_lists_are_tables_with_rows_of_any_length(table_page: int, backend: Any) -> None:
    """As flashinfer has them: entries of all requests one after the other, and where each begins."""
    lengths = [130, 1, 64, 210, 65]
    budget = PageBudget(pages=4, recent_pages=1, sink_pages=1)
    given = cache(lengths, 256, table_page, 8, 2, 64)
    scores = page_scores(**given, budget=budget, backend=backend, splits=3)
    rows, tokens = select_pages(scores, given["pages"], budget=budget, backend=backend)
    counts = [-(-length // table_page) for length in lengths]
    table = torch.cat([given["pages"].table[row, :count] for row, count in enumerate(counts)])
    starts = torch.tensor([sum(counts[:row]) for row in range(5)], dtype=torch.int32, device=DEVICE)
    listed = replace(given["pages"], table=table, starts=starts)
    out = torch.empty_like(scores)
    page_scores(**{**given, "pages": listed}, budget=budget, out=out, backend=backend, splits=3)
    assert torch.equal(out.nan_to_num(), scores.nan_to_num())
    kept = [-(-int(count) // table_page) for count in tokens]
    out_table = torch.full((sum(kept) + 2,), -7, dtype=torch.int32, device=DEVICE)
    out_starts = torch.tensor([1 + sum(kept[:row]) for row in range(5)], dtype=torch.int32, device=DEVICE)
    _, again = select_pages(
        scores,
        listed,
        budget=budget,
        out_table=out_table,
        out_starts=out_starts,
        backend=backend,
    )
    assert torch.equal(again, tokens)
    expected = torch.cat([rows[row, :count] for row, count in enumerate(kept)]).tolist()
    assert out_table.tolist() == [-7, *expected, -7]  # nothing beside them


@pytest.mark.parametrize("values", [5, 2**20])
@pytest.mark.parametrize(("page_tokens", "table_page", "pages"), [(64, 1, 100), (16, 16, 64), (16, 2, 300)])
def test_selections_of_any_size_and_with_any_ties_are_the_definition(
    page_tokens: int, table_page: int, pages: int, values: int
) -> None:
    """Their entries take more than one tile; `values` different scores, some of them above 2."""
    generator = torch.Generator().manual_seed(pages)
    lengths = torch.tensor([16384, 900, 9001, pages * page_tokens + 1], dtype=torch.int32, device=DEVICE)
    scores = torch.randint(values, (4, 16384 // page_tokens), generator=generator) * (3 / values)
    table = torch.stack([torch.randperm(16384 // table_page, generator=generator) for _ in range(4)])
    given = scores.to(DEVICE), CachedPages(table.int().to(DEVICE), lengths, table_page)
    budget = PageBudget(page_tokens, pages, recent_pages=8, sink_pages=1)
    found = {backend: select_pages(*given, budget=budget, backend=backend) for backend in BOTH}
    assert torch.equal(found["naive"][1], found["triton"][1])
    for row, tokens in enumerate(found["naive"][1].tolist()):
        count = -(-tokens // table_page)
        assert torch.equal(found["naive"][0][row, :count], found["triton"][0][row, :count])


@pytest.mark.parametrize("score", [float("nan"), -float("nan"), float("inf"), -0.0])
@pytest.mark.parametrize("table_page", [1, 16])
def test_scores_that_are_no_numbers_take_no_room_of_others(table_page: int, score: float) -> None:
    lengths, budget = torch.full((3,), 512, dtype=torch.int32, device=DEVICE), PageBudget(16, 8, 2, 1)
    scores = torch.rand(3, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table = torch.arange(3 * 512 // table_page, dtype=torch.int32, device=DEVICE).view(3, -1)
    cached = CachedPages(table, lengths, table_page)
    expected, _ = select_pages(scores, cached, budget=budget, backend="triton")
    scores[1] = score
    found, tokens = select_pages(scores, cached, budget=budget, backend="triton")
    assert tokens.tolist() == [128] * 3 and torch.equal(found[::2], expected[::2])
    own = found[1].tolist()
    assert own == sorted(set(own)) and set(own) <= set(table[1].tolist())


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_of_equal_scores_the_lower_pages_win(backend: Any) -> None:
    scores = torch.tensor([[0.5, 0.25, 0.25, 0.25, 0.0, 0.25, 0.0, 0.0]], device=DEVICE)
    table = torch.arange(8, dtype=torch.int32, device=DEVICE)[None] * 10
    lengths = torch.tensor([8 * 16], dtype=torch.int32, device=DEVICE)

    def kept(**sizes: int) -> list[int]:
        budget = PageBudget(pages=4, **{"recent_pages": 1, **sizes})
        found, tokens = select_pages(scores, CachedPages(table, lengths, 16), budget=budget, backend=backend)
        assert tokens.tolist() == [64]
        return found[0].tolist()

    assert kept() == [0, 10, 20, 70]
    assert kept(recent_pages=2) == [0, 10, 60, 70]
    assert kept(recent_pages=2, sink_pages=1) == [0, 10, 60, 70]
    scores.zero_()
    assert kept(sink_pages=2) == [0, 10, 20, 70]


def test_it_is_the_same_bits_each_time() -> None:
    given = cache([140, 200], 256, 1, 8, 2, 64)
    budget = PageBudget(pages=8, recent_pages=2)
    first = page_scores(**given, budget=budget, backend="triton", splits=3)
    for _ in range(1 if INTERPRETED else 100):
        again = page_scores(**given, budget=budget, backend="triton", splits=3)
        assert torch.equal(again.nan_to_num(), first.nan_to_num())


def memory_of(steps: ReusePolicy, requests: list[int], rows: int, pages: int) -> StepMemory:
    """Memory of a server that others have used before."""
    averaged = steps.policy == "ema"
    return StepMemory(
        requests=torch.tensor(requests, device=DEVICE),
        steps=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        averages=torch.full((rows, pages), 9.0, device=DEVICE) if averaged else None,
        beta=steps.beta or 0.0,
        held=None if averaged else torch.ones(rows, pages, dtype=torch.bool, device=DEVICE),
        every=steps.every or 0,
    )


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("steps", ["ema:0.7", "refresh:3"])
def test_memory_is_the_reference_engines(steps: str, backend: Any) -> None:
    """Requests that begin within the budget or beyond it, that change places, end, and begin anew in an old row."""
    selection = Selection(
        page_tokens=4, pages=5, recent_pages=2, sink_pages=1, score="token_max", steps=ReusePolicy.parse(steps)
    )
    budget = PageBudget(4, pages=5, recent_pages=2, sink_pages=1)
    memory = memory_of(selection.steps, [0], 6, 16)
    generator = torch.Generator().manual_seed(0)
    running = {5: (18, PageSelector(selection)), 2: (33, PageSelector(selection))}  # by row: length
    for step in range(24):
        if step == 9:
            del running[2]
        if step == 14:
            running = {2: (25, PageSelector(selection)), **running}
            memory.steps[2] = 0
        lengths = torch.tensor([length for length, _ in running.values()], dtype=torch.int32, device=DEVICE)
        most = -(-int(lengths.max()) // 4)
        scores = torch.rand(len(lengths), most, generator=generator).to(DEVICE)
        batch = StepMemory(
            torch.tensor([*running], device=DEVICE),
            *(memory.steps, memory.averages, memory.beta, memory.held, memory.every),
        )
        table = torch.arange(len(lengths) * most, dtype=torch.int32, device=DEVICE).view(-1, most)
        cached = CachedPages(table, lengths, 4)
        found, tokens = select_pages(scores, cached, budget=budget, memory=batch, backend=backend)
        for row, (request, (length, selector)) in enumerate(list(running.items())):
            live = -(-length // 4)
            kept = selector.choose(scores[row : row + 1, None, :live].cpu(), length - 1)[0, 0]
            expected = (kept.nonzero()[:, 0] + row * most).tolist()
            assert found[row, : -(-int(tokens[row]) // 4)].tolist() == expected, (step, row)
            running[request] = (length + 1, selector)
    assert memory.steps.tolist()[2] == 10 and memory.steps.tolist()[0] == 0


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_steps_that_hold_their_pages_are_not_scored(backend: Any) -> None:
    given, budget = cache([130, 140], 256, 1, 4, 2, 32), PageBudget(pages=4, recent_pages=1)
    memory = memory_of(ReusePolicy.parse("refresh:2"), [1, 0], 2, 16)
    memory.steps[0] = 1
    scores = page_scores(**given, budget=budget, memory=memory, backend=backend)
    assert scores[0, :9].isfinite().all() and scores[1].isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held": None}, "memory has averages and held, or neither, expected one of them"),
        ({"every": 1}, "every is 1, expected at least 2"),
        ({"held": None, "averages": torch.zeros(3, 16), "beta": 1.0}, "beta is 1.0, expected a number between 0 and 1"),
        ({"held": torch.zeros(3, 12, dtype=torch.bool)}, r"held is \[3, 12\] of torch.bool, expected \[3, 16\]"),
        ({"held": torch.zeros(3, 16)}, r"held is \[3, 16\] of torch.float32, expected \[3, 16\] of torch.bool"),
        ({"requests": torch.zeros(2, dtype=torch.int64)}, r"requests is \[2\] of torch.int64, expected \[1\]"),
        ({"steps": torch.zeros(3)}, r"steps is \[3\] of torch.float32, expected \[3\] of torch.int32"),
    ],
)
def test_memory_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    memory = {
        "requests": torch.zeros(1, dtype=torch.int64, device=DEVICE),
        "steps": torch.zeros(3, dtype=torch.int32, device=DEVICE),
        "held": torch.zeros(3, 16, dtype=torch.bool, device=DEVICE),
        "every": 2,
        **changes,
    }
    given, budget = cache([200], 256, 16, 4, 2, 32), PageBudget(pages=4, recent_pages=1)
    with pytest.raises(KernelInputError, match=message):
        page_scores(**given, budget=budget, memory=StepMemory(**memory))
    with pytest.raises(KernelInputError, match=message):
        scores = torch.zeros(1, 16, device=DEVICE)
        select_pages(scores, given["pages"], budget=budget, memory=StepMemory(**memory))


def test_static_outputs_are_written_in_place() -> None:
    given, budget = cache([200], 256, 16, 4, 2, 32), PageBudget(pages=4, recent_pages=1)
    out = torch.full((1, 16), 7.0, device=DEVICE)
    assert page_scores(**given, budget=budget, out=out, backend="triton") is out and (out[0, 13:] == 7.0).all()
    table, lengths = (
        torch.full((1, 4), 7, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    found = select_pages(out, given["pages"], budget=budget, out_table=table, out_lengths=lengths)
    assert found[0] is table and found[1] is lengths and lengths.tolist() == [3 * 16 + 8]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"page_tokens": 12}, "page_tokens is 12, expected a power of two"),
        ({"recent_pages": 0}, "recent_pages is 0, expected at least 1"),
        ({"sink_pages": -1}, "sink_pages is -1, expected at least 0"),
        ({"pages": 8}, r"pages is 8, expected more than recent_pages \(8\) and sink_pages \(0\) together"),
    ],
)
def test_budgets_that_can_not_be(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        PageBudget(**sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table_page": 3}, r"table_page is 3, expected a divisor of page_tokens \(16\)"),
        ({"table_page": 0}, "table_page is 0, expected at least 1"),
        ({"table": torch.zeros(1, 128, dtype=torch.int32)[:, ::2]}, "in rows"),
        ({"table": torch.zeros(1, 64)}, r"table is \[1, 64\] of torch.float32, expected \[B, M\] of torch.int32"),
        (
            {"lengths": torch.zeros(2, dtype=torch.int32)},
            r"lengths is \[2\] of torch.int32, expected \[1\] of torch.int32",
        ),
        (
            {"q": torch.zeros(1, 3, 16)},
            r"q is \[1, 3, 16\] and k \[64, 2, 16\], expected \[1, H, D\] and \[slots, G, D\]",
        ),
        ({"q": torch.zeros(1, 4, 16).half()}, "q is torch.float16 and k torch.float32, expected one dtype"),
        ({"lse": torch.zeros(1, 2)}, r"lse is \[1, 2\] of torch.float32, expected \[1, 4\] of torch.float32"),
        ({"out": torch.zeros(1, 5)}, r"out is \[1, 5\] of torch.float32, expected \[1, 4\] of torch.float32"),
        ({"backend": "cuda"}, "backend is cuda, expected auto, naive or triton"),
        ({"starts": torch.zeros(1, dtype=torch.int32)}, r"table is \[1, 64\] of torch.int32, expected \[T\]"),
        (
            {"table": torch.zeros(64, dtype=torch.int32), "starts": torch.zeros(1, dtype=torch.int32)},
            r"out is not \[B, N\], expected the most pages of a request where table is a list",
        ),
        (
            {"table": torch.zeros(64, dtype=torch.int32), "starts": torch.zeros(1)},
            r"starts is \[1\] of torch.float32, expected \[1\] of torch.int32",
        ),
    ],
)
def test_inputs_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(1, 4, 16),
        "k": torch.zeros(64, 2, 16),
        "lse": torch.zeros(1, 4),
        "scale": 0.25,
        "budget": PageBudget(pages=3, recent_pages=1),
        "table": torch.zeros(1, 64, dtype=torch.int32),
        "lengths": torch.tensor([60], dtype=torch.int32),
        **changes,
    }
    with pytest.raises(KernelInputError, match=message):
        cached = {item.name: given.pop(item.name) for item in fields(CachedPages) if item.name in given}
        page_scores(**given, pages=CachedPages(**cached))


def test_outputs_that_do_not_fit() -> None:
    table, lengths = torch.zeros(1, 64, dtype=torch.int32), torch.tensor([60], dtype=torch.int32)
    budget = PageBudget(pages=3, recent_pages=1)
    with pytest.raises(KernelInputError, match=r"scores is \[1, 5\] of torch.float32, expected \[1, 4\]"):
        select_pages(torch.zeros(1, 5), CachedPages(table, lengths), budget=budget)
    with pytest.raises(KernelInputError, match=r"out_table is \[1, 3\] of torch.int32, expected \[1, 48\]"):
        select_pages(torch.zeros(1, 4), CachedPages(table, lengths), budget=budget, out_table=table[:, :3])
