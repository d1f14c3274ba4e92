"""Scores of blocks and attention over them: Triton against definitions, with gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_dense.hf.page_selector import compressed_scores
from indexcache_dense.selection import Selection
from indexcache_kernels import KernelInputError
from indexcache_lab.kernels import block_attention, block_scores, compress_keys
from tests.kernels.interpreter import DEVICE, INTERPRETED, KERNELS, LARGE, poisoned

__all__ = ["poisoned"]  # a fixture of every test here


ROOM = 200 if INTERPRETED else 300  # tokens of a cache
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(
    heads: int,
    groups: int,
    dim: int,
    v_dim: int,
    queries: int,
    block_tokens: int,
    dtype: torch.dtype,
    by_head: bool = False,
) -> dict[str, Any]:
    """Two requests; some queries see less, one has a single block, one none; blocks are in no order.

    All heads share the blocks, or each key head has its own.
    """
    number = -(-ROOM // block_tokens)
    generator = torch.Generator().manual_seed(1)
    rows = (2, queries, groups) if by_head else (2, queries)
    chosen = torch.stack([torch.randperm(number, generator=generator)[:3] for _ in range(math.prod(rows))])
    blocks = chosen.view(*rows, 3).int()
    lengths = torch.randint(block_tokens * (number - 1) + 1, ROOM + 1, (2, queries), generator=generator).int()
    blocks[0, 0, ..., 1:], blocks[1, queries - 1] = -1, -1
    q, k, v = normal(2, queries, heads, dim), normal(2, groups, ROOM, dim, seed=2), normal(2, groups, ROOM, v_dim)
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "blocks": blocks.to(DEVICE)}
    return {**given, "lengths": lengths.to(DEVICE), "scale": dim**-0.5, "block_tokens": block_tokens}


def on_cpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: item.cpu() if isinstance(item, Tensor) else item for name, item in given.items()}


SHAPES = [
    *((4, 2, 32, 32, 16), (9, 3, 24, 40, 64), (2, 1, 96, 64, 8)),
    pytest.param(6, 6, 64, 16, 100, marks=LARGE),
]


@pytest.mark.parametrize(
    ("dtype", "biased", "by_head"),
    [
        (torch.float32, False, False),
        (torch.float32, True, False),
        (torch.float32, True, True),
        pytest.param(torch.bfloat16, False, False, marks=LARGE),
        pytest.param(torch.bfloat16, True, True, marks=LARGE),
    ],
    ids=str,
)
@pytest.mark.parametrize(("heads", "groups", "dim", "v_dim", "block_tokens"), SHAPES)
def test_attention_and_gradients_are_the_definitions(
    heads: int, groups: int, dim: int, v_dim: int, block_tokens: int, dtype: torch.dtype, biased: bool, by_head: bool
) -> None:
    given = case(heads, groups, dim, v_dim, 3, block_tokens, dtype, by_head)
    bias = normal(2, groups, ROOM, seed=5) if biased else None
    results: list[list[Tensor]] = []
    for backend in ("naive", "triton"):
        leaves = {name: given[name].detach().clone().requires_grad_() for name in "qkv"}
        if bias is not None:
            leaves["bias"] = bias.clone().requires_grad_()
        out = block_attention(**{**given, **leaves}, backend=backend)  # type: ignore[arg-type]
        out.backward(normal(*out.shape, seed=6).to(dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves.values())])  # type: ignore[list-item]
    for naive, kernel in zip(*results, strict=True):
        assert naive.dtype == kernel.dtype and bool(kernel.isfinite().all())
        torch.testing.assert_close(kernel.float(), naive.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not results[1][0][1, 2].any()  # a query without a block


@pytest.mark.parametrize("length", [20, pytest.param(70, marks=LARGE)])
def test_all_blocks_are_attention_to_everything_with_gradients(length: int) -> None:
    """PyTorch's own, causal, and NOSA's equation 8: shares times exp(bias); also with blocks of each key head."""
    heads, groups, dim = 4, 2, 16
    q, k = normal(1, length, heads, dim), normal(1, groups, length, dim, seed=1)
    v = normal(1, groups, length, 16, seed=2)
    number = -(-length // 16)
    blocks = torch.arange(number, dtype=torch.int32, device=DEVICE).expand(1, length, number)
    lengths = torch.arange(1, length + 1, dtype=torch.int32, device=DEVICE)[None]
    blocks = torch.where(blocks * 16 < lengths[..., None], blocks, -1)
    given: dict[str, Any] = {"lengths": lengths, "scale": dim**-0.5, "block_tokens": 16}
    by_head = blocks[:, :, None].expand(-1, -1, groups, -1)
    for bias, chosen in (
        (None, blocks),
        (normal(1, groups, length, seed=4), blocks),
        (normal(1, groups, length, seed=4), by_head),
    ):
        leaves = [item.clone().requires_grad_() for item in (q, k, v)]
        out = block_attention(*leaves, **given, blocks=chosen, bias=bias, backend="triton")
        others = [item.clone().requires_grad_() for item in (q, k, v)]
        products = others[0].transpose(1, 2) @ others[1].repeat_interleave(2, 1).mT * dim**-0.5
        seen = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        weights = products.masked_fill(~seen, -torch.inf).exp()
        weights = weights if bias is None else weights * bias.repeat_interleave(2, 1)[:, :, None].exp()
        expected = (weights / weights.sum(-1, keepdim=True)) @ others[2].repeat_interleave(2, 1)
        torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)
        grad = normal(*out.shape, seed=3)
        out.backward(grad)
        expected.backward(grad.transpose(1, 2))
        for mine, theirs in zip(leaves, others, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["naive", "triton", "auto"])
def test_a_key_head_with_blocks_of_its_own_is_a_request_of_its_own(backend: Any) -> None:
    """Bit for bit; on a CPU `auto` is the compiled kernel. One key head is `joint`."""
    given = case(9, 3, 32, 64, 1, 16, torch.float32, by_head=True)
    given = {**given, **{name: given[name][:, 0] for name in ("q", "blocks", "lengths")}}
    found = block_attention(**given, backend=backend)
    for kv_head in range(3):
        own = {name: given[name][:, [kv_head]] for name in "kv"}
        query = given["q"][:, 3 * kv_head : 3 * kv_head + 3]
        joint = {**given, **own, "q": query, "blocks": given["blocks"][:, kv_head]}
        expected = block_attention(**joint, backend=backend)
        assert torch.equal(found[:, 3 * kv_head : 3 * kv_head + 3], expected)
        assert torch.equal(block_attention(**{**joint, "blocks": joint["blocks"][:, None]}, backend=backend), expected)
    assert not torch.allclose(found, block_attention(**{**given, "blocks": given["blocks"][:, 0]}, backend=backend))


def test_a_cache_that_is_a_part_of_a_longer_one() -> None:
    given = case(4, 2, 32, 32, 1, 16, torch.float32)
    longer = {name: torch.nn.functional.pad(given[name], (0, 0, 9, 30), value=torch.nan) for name in "kv"}
    views = {name: item[:, :, 9:-30] for name, item in longer.items()}
    one = {name: given[name][:, 0] for name in ("q", "blocks", "lengths")}
    expected = block_attention(**given, backend="triton")[:, 0]
    found = block_attention(**{**given, **one, **views}, backend="triton")
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": torch.zeros(2, 2, 9)}, rf"bias is \[2, 2, 9\] of torch.float32, expected \[2, 2, {ROOM}\]"),
        ({"bias": torch.zeros(2, 2, ROOM).double()}, "bias is .* of torch.float64"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, r"lengths is \[2\] of torch.int32, expected \[2, 3\]"),
        (
            {"blocks": torch.zeros(2, 3, dtype=torch.int32)},
            r"blocks is \[2, 3\] of torch.int32, expected \[2, 3, N\] or \[2, 3, 2, N\]",
        ),
        ({"blocks": torch.zeros(2, 3, 3, 1, dtype=torch.int32)}, r"blocks is \[2, 3, 3, 1\] of torch.int32"),
        ({"backend": "cpu"}, "backend cpu takes one query a request, found 3"),
        ({"backend": "cuda"}, "backend is cuda, expected auto, naive or triton"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    given = on_cpu(case(4, 2, 32, 32, 3, 16, torch.float32))
    with pytest.raises(KernelInputError, match=message):
        block_attention(**{**given, **changes})


def test_the_compiled_kernel_is_not_asked_for_what_it_has_not() -> None:
    """Gradients and biases come from the definition, and are not lost."""
    given = on_cpu(case(4, 2, 32, 32, 1, 16, torch.float32))
    leaf = given["q"].clone().requires_grad_()
    block_attention(**{**given, "q": leaf}).sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.any())
    bias = normal(2, 2, ROOM).cpu()
    found = block_attention(**given, bias=bias)
    assert torch.equal(found, block_attention(**given, bias=bias, backend="naive"))
    assert not torch.allclose(found, block_attention(**given))
    with pytest.raises(KernelInputError, match="backend cpu has no bias"):
        block_attention(**given, bias=bias, backend="cpu")
    with pytest.raises(KernelInputError, match="backend cpu has no gradients"):
        block_attention(**{**given, "q": leaf}, backend="cpu")


# -- scores


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("naive", torch.float32),
        ("naive", torch.bfloat16),
        ("triton", torch.float32),
        pytest.param("triton", torch.bfloat16, marks=LARGE),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "block_tokens"),
    [(9, 3, 24, 16), pytest.param(4, 2, 32, 64, marks=LARGE), pytest.param(32, 2, 96, 128, marks=LARGE)],
)
def test_scores_are_those_of_the_search(
    backend: str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    dim: int,
    block_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of requests of many lengths, on keys that are rounded; whatever lies behind a request does not count."""
    if INTERPRETED:  # as many parts as have keys
        monkeypatch.setattr(KERNELS["block_scores"], "_PROGRAMS", 72)
        monkeypatch.setattr(KERNELS["block_scores"], "_TILE", 16)
    lengths, room = [1, 31, 32, 33, 47, 48, 63, 64, 65, 200, 350, 351], 351
    q, k = normal(len(lengths), heads, dim), normal(len(lengths), groups, room, dim, seed=1)
    compressed = compress_keys(k.to(dtype))
    assert compressed.shape == (len(lengths), groups, (room - 32) // 16 + 1, dim)
    given = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    found = block_scores(q.to(dtype), compressed, given, scale=0.3, block_tokens=block_tokens, backend=backend)
    assert bool(found.isfinite().all())
    for row, length in enumerate(lengths):
        selection = Selection(page_tokens=block_tokens, pages=4, recent_pages=1, sink_pages=0, score="compressed_keys")
        expected = compressed_scores(q[[row], :, None], k[[row], :, :length].to(dtype), 0.3, selection)[0, 0]
        torch.testing.assert_close(found[row, : len(expected)], expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert not found[row, len(expected) :].any()


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_scores_of_key_heads_are_those_of_the_search(backend: str) -> None:
    """Each key head as if it were alone, and their sum is the joint one; into a given tensor that is no whole, too."""
    lengths, room = torch.tensor([20, 90, 200], dtype=torch.int32, device=DEVICE), 201
    q, k = normal(3, 6, 24), normal(3, 2, room, 24, seed=1)
    given: dict[str, Any] = {"lengths": lengths, "scale": 0.3, "block_tokens": 32, "backend": backend}
    found = block_scores(q, compress_keys(k), **given, heads="key")
    assert found.shape == (3, 2, 7)
    selection = Selection(page_tokens=32, pages=4, recent_pages=1, sink_pages=0, score="compressed_keys", heads="key")
    for row, length in enumerate(lengths.tolist()):
        expected = compressed_scores(q[[row], :, None], k[[row], :, :length], 0.3, selection)[:, 0]
        torch.testing.assert_close(found[row, :, : expected.shape[1]], expected, atol=1e-5, rtol=1e-5)
    for kv_head in range(2):
        alone = block_scores(q[:, 3 * kv_head : 3 * kv_head + 3], compress_keys(k[:, [kv_head]]), **given)
        torch.testing.assert_close(found[:, kv_head], alone, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.sum(1), block_scores(q, compress_keys(k), **given), atol=1e-6, rtol=1e-6)
    part = torch.full((3, 2, 9), torch.nan, device=DEVICE)
    block_scores(q, compress_keys(k), **given, heads="key", out=part[..., :7])
    assert torch.equal(part[..., :7], found) and bool(part[..., 7:].isnan().all())


def test_scores_of_a_cache_that_is_too_short_to_have_any() -> None:
    compressed = compress_keys(normal(2, 2, 20, 16))
    lengths = torch.tensor([3, 20], dtype=torch.int32, device=DEVICE)
    assert compressed.shape == (2, 2, 0, 16)
    for backend in ("naive", "triton"):
        found = block_scores(normal(2, 4, 16), compressed, lengths, scale=1.0, block_tokens=16, backend=backend)
        assert found.shape == (2, 2) and not found.any()


def test_scores_say_what_does_not_fit() -> None:
    q, compressed, lengths = normal(2, 4, 16), normal(2, 2, 9, 16), torch.ones(2, dtype=torch.int32, device=DEVICE)
    fits: dict[str, Any] = {"q": q, "compressed": compressed, "lengths": lengths, "scale": 1.0, "block_tokens": 64}
    for changes, message in (
        ({"q": q[:1]}, r"q is \[1, 4, 16\] and compressed \[2, 2, 9, 16\]"),
        ({"q": q[:, :3]}, "q has 3 heads of .* dimensions, expected some, and a multiple of the 2 of keys"),
        ({"q": q.bfloat16()}, "q is torch.bfloat16 and compressed torch.float32"),
        ({"block_tokens": 48}, "block_tokens is 48, expected 16 times a power of two"),
        ({"block_tokens": 8}, "block_tokens is 8, expected 16 times a power of two"),
        ({"lengths": lengths.long()}, "lengths is .* of torch.int64"),
        ({"out": torch.zeros(2, 9, device=DEVICE)}, r"out is \[2, 9\] of torch.float32, expected \[2, 3\]"),
        ({"backend": "cuda"}, "backend is cuda"),
        ({"heads": "group"}, "heads is 'group', expected joint or key"),
        ({"heads": "key", "out": torch.zeros(2, 3)}, r"out is \[2, 3\] of torch.float32, expected \[2, 2, 3\]"),
    ):
        with pytest.raises(KernelInputError, match=message):
            block_scores(**{**fits, **changes})  # type: ignore[arg-type]
    with pytest.raises(KernelInputError, match=r"k is \[3, 4\], expected"):
        compress_keys(normal(3, 4))
