"""Kernels against their definitions; under Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from indexcache_kernels import KernelInputError, causal_ranges, indexer_kl, indexer_topk, sparse_attention
from indexcache_kernels.indexer_kl import naive as naive_kl
from indexcache_kernels.indexer_kl import visible_keys
from indexcache_kernels.indexer_topk import naive
from indexcache_kernels.sparse_attention import flash_mla
from tests.interpreter import DEVICE, INTERPRETED, KERNELS, poisoned

__all__ = ["poisoned"]  # a fixture of every test here


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def inputs(queries: int, keys: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random queries, keys, weights of both signs, and scales of quantised keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    found = {
        "q": normal(queries, heads, dim).to(dtype),
        "k": normal(keys, dim).to(dtype),
        "weights": normal(queries, heads),
    }
    if dtype == torch.float8_e4m3fn:
        found["k_scale"] = normal(keys).exp()
    return found


def causal(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Ranges of queries that are the last of `keys` tokens."""
    ends = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=DEVICE)
    return torch.zeros_like(ends), ends


def check_topk(found: Tensor, given: dict[str, Tensor], starts: Tensor, ends: Tensor, topk: int) -> None:
    """Every row holds as many keys as it can, each once, and none left out scores higher than one taken, but for
    rounding."""
    scores = naive.indexer_scores(
        given["q"].double(), given["k"].double(), given["weights"].double(), given.get("k_scale")
    )
    assert found.dtype == torch.int32 and found.shape == (len(starts), topk)
    for row, chosen, start, end in zip(scores, found.tolist(), starts.tolist(), ends.tolist(), strict=True):
        kept = [index for index in chosen if index >= 0]
        assert kept == chosen[: len(kept)] and len(kept) == len(set(kept))
        assert len(kept) == min(topk, max(0, end - start))
        assert all(start <= index < end for index in kept)
        others = sorted(set(range(start, end)) - set(kept))
        if kept and others:
            tolerance = 1e-5 * row.abs().max()
            assert row[others].max() <= row[kept].min() + tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "dim", "topk"),
    [(1, 1, 1, 16, 4), (63, 63, 4, 32, 16), (5, 111, 3, 24, 64), (17, 1000, 32, 128, 100), (3, 130, 64, 128, 200)],
)
def test_indexer_topk_takes_the_highest_scores(
    queries: int, keys: int, heads: int, dim: int, topk: int, dtype: torch.dtype
) -> None:
    given, (starts, ends) = inputs(queries, keys, heads, dim, dtype), causal(queries, keys)
    check_topk(indexer_topk(**given, starts=starts, ends=ends, topk=topk, backend="triton"), given, starts, ends, topk)


def test_indexer_topk_of_ragged_sequences() -> None:
    lengths = torch.tensor([0, 7, 8, 21, 21, 50], dtype=torch.int32, device=DEVICE)
    starts, ends = causal_ranges(lengths)
    assert starts.tolist()[:9] == [0] * 7 + [7, 8] and ends.tolist()[:3] == [1, 2, 3]
    given = inputs(50, 50, 32, 32, torch.bfloat16)
    found = indexer_topk(**given, starts=starts, ends=ends, topk=16, backend="triton")
    check_topk(found, given, starts, ends, 16)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["random", "misleading sample", "rising", "equal"])
def test_indexer_topk_of_rows_longer_than_the_room_for_candidates(
    kind: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KERNELS["indexer_topk"], "SEGMENT", 64)
    queries, keys = 6, 770
    given = {name: tensor.round() for name, tensor in inputs(queries, keys, 2, 16, torch.float32).items()}  # exact
    given["weights"].abs_()
    starts, ends = causal(queries, keys)
    starts[1], ends[1] = 300, 400
    if kind == "misleading sample":
        sampled = given["k"][:: keys // splits // 64]
        sampled[:] = given["q"][0, 0] * torch.arange(9, 9 + len(sampled), device=DEVICE)[:, None]
    elif kind == "rising":  # every key is a candidate
        given["k"][:] = given["q"][0, 0] * torch.arange(keys, device=DEVICE)[:, None]
    elif kind == "equal":
        given["weights"][:] = 0.0
    found = KERNELS["indexer_topk"].indexer_topk(**given, starts=starts, ends=ends, topk=60, splits=splits)
    assert torch.equal(found, indexer_topk(**given, starts=starts, ends=ends, topk=60, backend="naive"))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indexer_topk_of_long_contexts(dtype: torch.dtype, heads: int) -> None:
    queries, keys = 2000, 20_000  # more blocks of queries than programs, and every path of the kernel
    given, (starts, ends) = inputs(queries, keys, heads, 128, dtype), causal(queries, keys)
    starts[100:200], ends[300:400] = 15_000, 3_000
    found = indexer_topk(**given, starts=starts, ends=ends, topk=2048)
    for rows in torch.arange(queries, device=DEVICE).split(250):
        part = {name: tensor[rows] if name in ("q", "weights") else tensor for name, tensor in given.items()}
        scores = naive.indexer_scores(**{name: tensor.double() for name, tensor in part.items()})
        place = torch.arange(keys, device=DEVICE)
        outside = (place < starts[rows, None]) | (place >= ends[rows, None])
        scores = scores.masked_fill(outside, -torch.inf)
        chosen = torch.zeros(len(rows), keys + 1, dtype=torch.bool, device=DEVICE)
        chosen = chosen.scatter_(1, found[rows].long() % (keys + 1), True)[:, :keys]
        assert torch.equal(chosen.sum(1), (~outside).sum(1).clamp(max=2048)) and not (chosen & outside).any()
        lowest = scores.masked_fill(~chosen, torch.inf).amin(1)
        left_out = scores.masked_fill(chosen, -torch.inf).amax(1)
        excess = (left_out - lowest) / scores.masked_fill(outside, 0.0).abs().amax(1)
        assert excess.max() <= (1e-3 if dtype == torch.float8_e4m3fn else 1e-5)  # its tensor cores keep fewer bits
    for _ in range(100):
        assert torch.equal(found, indexer_topk(**given, starts=starts, ends=ends, topk=2048))


def test_indexer_topk_takes_the_lowest_of_equal_scores() -> None:
    queries, keys = 4, 100
    given = {name: tensor.round() for name, tensor in inputs(queries, keys, 2, 16, torch.float32).items()}  # exact
    given["k"][:] = given["k"][:4].repeat(25, 1)  # every score 25 times
    given["weights"][1] = 0.0  # all equal
    given["weights"][2] = -1.0  # zeros of both signs
    starts, ends = causal(queries, keys)
    found = indexer_topk(**given, starts=starts, ends=ends, topk=30, backend="triton")
    assert torch.equal(found, indexer_topk(**given, starts=starts, ends=ends, topk=30, backend="naive"))
    assert found[1].tolist() == list(range(30))


def test_indexer_topk_of_rows_that_see_nothing() -> None:
    given = inputs(3, 8, 2, 16, torch.float32)
    starts, ends = (torch.tensor(item, dtype=torch.int32, device=DEVICE) for item in ([0, 5, 2], [0, 5, 4]))
    for backend in ("naive", "triton"):
        found = indexer_topk(**given, starts=starts, ends=ends, topk=3, backend=backend)  # type: ignore[arg-type]
        assert found.tolist() == [[-1, -1, -1], [-1, -1, -1], [2, 3, -1]]


def test_indexer_topk_repeats_bit_for_bit() -> None:
    given, (starts, ends) = inputs(20, 300, 4, 32, torch.bfloat16), causal(20, 300)
    first = indexer_topk(**given, starts=starts, ends=ends, topk=50, backend="triton")
    for _ in range(2):
        assert torch.equal(first, indexer_topk(**given, starts=starts, ends=ends, topk=50, backend="triton"))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
def test_what_has_an_order_repeats_bit_for_bit() -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator).bfloat16()

    q, k, index_q, index_k = normal(50, 64, 576), normal(3000, 1, 576), normal(50, 32, 128), normal(3000, 128)
    indices = torch.stack([torch.randperm(3000, device=DEVICE, generator=generator)[:1000] for _ in range(50)]).int()
    weights = torch.randn(50, 32, device=DEVICE, generator=generator)
    q.requires_grad_()

    def run() -> list[Tensor]:
        out, lse = sparse_attention(q, k, 512, indices, 0.05, backend="triton")
        _, loss = indexer_kl(q, k, lse, 0.05, index_q, index_k, weights, indices=indices)
        return [out, lse, torch.autograd.grad(out.float().sum(), q)[0], loss]

    first = run()
    for _ in range(100):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda q: q[:, 0], "q is [4, 16] and k [9, 16], expected [T, I, C] and [L, C]"),
        ("k", lambda k: k.bfloat16(), "q is torch.float32 and k torch.bfloat16"),
        ("weights", lambda weights: weights[:2], "weights is [2, 2], expected [4, 2]"),
        ("starts", lambda starts: starts.long(), "starts is torch.int64, expected torch.int32"),
        ("topk", lambda topk: 0, "topk is 0, expected at least 1"),
        ("topk", lambda topk: 8193, "topk is 8193, expected at most 8192 with backend triton"),
        ("backend", lambda backend: "fast", "backend is fast, expected auto, naive or triton"),
    ],
)
def test_indexer_topk_says_what_does_not_fit(name: str, change: object, message: str) -> None:
    starts, ends = causal(4, 9)
    given = {**inputs(4, 9, 2, 16, torch.float32), "starts": starts, "ends": ends, "topk": 2, "backend": "triton"}
    given[name] = change(given[name])  # type: ignore[operator]
    with pytest.raises(KernelInputError) as error:
        indexer_topk(**given)  # type: ignore[arg-type]
    assert message in str(error.value)


def relative_rms(found: Tensor, truth: Tensor) -> float:
    return float((found.detach().double() - truth.detach()).norm() / truth.detach().norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "v_dim", "topk"),
    [
        (1, 1, 1, 16, 16, 1),
        (3, 8, 1, 80, 64, 63),
        (2, 6, 2, 24, 40, 111),
        (2, 3, 3, 48, 16, 200),
        (1, 70, 1, 64, 64, 50),
        (1, 16, 1, 80, 64, 1000),
    ],
)
def test_sparse_attention_attends_to_the_selected_keys(
    tokens: int, heads: int, kv_heads: int, dim: int, v_dim: int, topk: int, dtype: torch.dtype, bound: float
) -> None:
    generator = torch.Generator().manual_seed(tokens * heads)
    keys = 1111 if topk == 1000 else 150
    q, k, v = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype)
        for shape in ((tokens, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, v_dim))
    )
    q, k, v = (item.requires_grad_() for item in (q, k, v))
    in_keys = v_dim == 64  # as in absorbed MLA
    if in_keys:
        v = k
    chosen = [torch.randperm(keys, generator=generator)[:topk] for _ in range(tokens)]
    indices = torch.stack([torch.nn.functional.pad(item, (0, topk - len(item)), value=-1) for item in chosen])
    indices = indices.int().to(DEVICE)
    indices[-1, topk // 2 :] = -1
    out, lse = sparse_attention(q, k, v_dim if in_keys else v, indices, dim**-0.5, backend="triton")
    exact = [item.detach().double().requires_grad_() for item in (q, k, v)]
    if in_keys:
        exact[2] = exact[1]
    values = exact[1][..., :v_dim] if in_keys else exact[2]
    truth, truth_lse = sparse_attention(*exact[:2], values, indices, dim**-0.5, backend="naive")
    if topk == 1:  # nothing is selected
        assert not torch.autograd.grad(out.sum(), q)[0].any()
        assert (out == 0).all() and (lse == -torch.inf).all() and (truth == 0).all() and (truth_lse == -torch.inf).all()
        return
    assert out.dtype == dtype and relative_rms(out, truth) < bound and relative_rms(lse, truth_lse) < bound
    above = torch.randn(truth.shape, generator=generator).to(DEVICE)
    found = torch.autograd.grad(out, (q, k, v), above.to(dtype))
    for gradient, expected in zip(found, torch.autograd.grad(truth, exact, above.to(dtype).double()), strict=True):
        assert relative_rms(gradient, expected) < bound
    if tokens > 1:
        indices[:] = -1
        assert (sparse_attention(q, k, v, indices, 1.0, backend="triton")[0] == 0).all()


def test_sparse_attention_says_what_does_not_fit() -> None:
    q, k, indices = torch.zeros(2, 3, 16), torch.zeros(5, 2, 16), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(KernelInputError, match="q has 3 heads, expected a multiple of the 2 of k"):
        sparse_attention(q, k, k, indices, 1.0)
    with pytest.raises(KernelInputError, match="expected one dtype"):
        sparse_attention(q[:, :2], k.bfloat16(), k, indices, 1.0)
    with pytest.raises(KernelInputError, match=r"expected \[2, K\] of torch.int32"):
        sparse_attention(q[:, :2], k, k, indices.long(), 1.0)


def test_what_flash_mla_gives_is_finished() -> None:
    out, lse = torch.randn(3, 6, 32, device=DEVICE).bfloat16(), torch.randn(3, 6, device=DEVICE)
    indices = torch.tensor([[-1, -1, 4], [-1, -1, -1], [0, -1, 2]], dtype=torch.int32, device=DEVICE)
    expected, logarithms = out.clone(), lse * math.log(2)
    out[1] = torch.nan
    expected[1], logarithms[1] = 0, -torch.inf
    KERNELS["sparse_attention"].finish(out, lse, indices)
    assert torch.equal(out, expected) and torch.allclose(lse, logarithms)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
@pytest.mark.parametrize("heads", [64, 24, 128])
def test_flash_mla_is_the_same_attention(heads: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(9, heads, 576, device=DEVICE, generator=generator).bfloat16()
    k = torch.randn(3000, 1, 576, device=DEVICE, generator=generator).bfloat16()
    if not flash_mla.fits(q, k, 512):
        with pytest.raises(KernelInputError, match="flash_mla can't run this"):
            sparse_attention(q, k, 512, torch.zeros(9, 4, dtype=torch.int32, device=DEVICE), 1.0, backend="flash_mla")
        pytest.skip("sgl_kernel is not installed")
    indices = torch.stack([torch.randperm(3000, device=DEVICE, generator=generator)[:2000] for _ in range(9)]).int()
    indices[1, 100:], indices[2] = -1, -1
    found, gradients = [], []
    for backend in ("flash_mla", "triton"):
        leaves = [item.clone().requires_grad_() for item in (q, k)]
        out, lse = sparse_attention(*leaves, 512, indices, 0.04, backend=backend)  # type: ignore[arg-type]
        found.append((out, lse))
        gradients.append(torch.autograd.grad(out.float().square().sum(), leaves))
    assert (found[0][0][2] == 0).all() and (found[0][1][2] == -torch.inf).all()
    seen = [0, 1, 3, 4, 5, 6, 7, 8]
    for one, other in zip(found[0], found[1], strict=True):
        assert relative_rms(one[seen], other[seen].double()) < 5e-3
    for one, other in zip(*gradients, strict=True):
        assert relative_rms(one, other.double()) < 1e-2


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all keys"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "indexers", "index_dim", "keys"),
    [(8, 1, 80, 4, 32, 130), (6, 3, 24, 3, 24, 111), (4, 1, 24, 4, 16, 1000)],
)
def test_indexer_kl_and_its_gradients(
    heads: int,
    kv_heads: int,
    dim: int,
    indexers: int,
    index_dim: int,
    keys: int,
    dtype: torch.dtype,
    bound: float,
    selected: bool,
) -> None:
    generator = torch.Generator().manual_seed(heads)
    queries = 5
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (queries, indexers, index_dim), (keys, index_dim))
    q, k, index_q, index_k = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    weights = torch.randn(queries, indexers, generator=generator).to(DEVICE) * 0.2
    starts, ends = causal(queries, keys)
    starts[1], ends[1], ends[2] = 30, 101, 0  # the third sees nothing
    chosen = [torch.randperm(keys, generator=generator)[:90] for _ in range(queries)]
    indices = torch.stack(chosen).int().to(DEVICE)
    indices[1, 40:], indices[2] = -1, -1
    all_keys = torch.arange(keys, dtype=torch.int32, device=DEVICE).expand(queries, -1)
    seen = all_keys.masked_fill((all_keys < starts[:, None]) | (all_keys >= ends[:, None]), -1)
    lse = sparse_attention(q, k, k, indices if selected else seen, 0.3, backend="naive")[1].float()
    losses, gradients = [], []
    for backend, exact in (("triton", dtype), ("naive", torch.float64)):
        trained = [item.to(exact).requires_grad_() for item in (index_q, index_k)]
        trained.append(weights.to(torch.float64 if backend == "naive" else torch.float32).requires_grad_())
        arguments = (None, None, indices) if selected else (starts, ends, None)
        if backend == "triton":
            total, loss = indexer_kl(q, k, lse, 0.3, *trained, *arguments, backend="triton")
        else:
            visible = visible_keys(keys, *arguments)
            loss = naive_kl.indexer_kl(q.double(), k.double(), 0.3, *trained, visible)
            total = loss.sum()
        assert loss[2] == 0 and (loss[[0, 1, 3, 4]] > 0).all()
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(3 * total, trained))
    assert relative_rms(losses[0], losses[1]) < bound
    for found, expected in zip(*gradients, strict=True):
        assert not found.isnan().any() and relative_rms(found, expected) < bound


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from indexcache_kernels.indexer_topk.triton import _merge_kernel, _stream_kernel
from indexcache_kernels.indexer_kl import triton as indexer_kl
from indexcache_kernels.sparse_attention.triton import _backward_kernel, _forward_kernel

def ptx(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name.removesuffix("_ptr"), "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

integers = ("starts", "ends", "marks", "candidates", "counts", "result", "result_values", "queue", "parts")
integers += ("part_values",)
numbers = dict.fromkeys(("num_queries", "num_blocks"), "i32")
common = {**dict.fromkeys(integers, "*i32"), "scores": "*fp32", "bounds": "*fp32", **numbers}
for key in ("fp8e4nv", "bf16"):
    types = {**common, "q": "*" + key, "k": "*" + key, "weights": "*fp32", "k_scale": "*fp32"}
    constants = dict(HEADS=64, PADDED_HEADS=64, DIM=128, PADDED_DIM=128, BLOCK_Q=2, BLOCK_K=64, SEGMENT=1024)
    constants |= dict(STEPS=6, CHUNK=128, TOPK=2048, ROOM=4096, SPLITS=2, SCALED=key == "fp8e4nv")
    constants |= dict(PRECISION="tf32", UPCAST=False)
    assert "wgmma" in ptx(_stream_kernel, types, constants, num_warps=4, num_stages=3, maxnreg=128), key
ptx(_merge_kernel, common, dict(TOTAL=4096, TOPK=2048, ROOM=4096, SEGMENT=1024), num_warps=4)
types = {"indices": "*i32", "lse": "*fp32", "scale": "fp32", **dict.fromkeys(("q", "k", "v", "out"), "*bf16")}
strides = [f"{item}_{axis}_stride" for item in "kv" for axis in ("row", "head")]
types |= dict.fromkeys((*strides, "num_heads", "num_kv_heads"), "i32")
types |= {"delta": "*fp32", "d_out": "*bf16", "d_q": "*bf16", "d_k": "*fp32", "d_v": "*fp32"}
constants = dict(GROUP=64, TOPK=2048, DIM=576, MAIN=512, TAIL=64, V_DIM=512, V_PADDED=512, UPCAST=False)
constants |= dict(PRECISION="tf32")
constants |= dict(SHARED=True)
forward = dict(BLOCK_H=64, BLOCK_K=64)
assert "wgmma" in ptx(_forward_kernel, types, constants | forward, num_warps=8, num_stages=2)
ptx(_backward_kernel, types, constants | dict(BLOCK_H=32, BLOCK_K=32), num_warps=8, num_stages=1)
types = {**types, **common, "loss": "*fp32", "index_lse": "*fp32", "d_loss": "*fp32", "weights": "*fp32"}
types |= {"index_q": "*bf16", "index_k": "*bf16", "d_q": "*bf16", "d_weights": "*fp32"}
constants = dict(HEADS=64, GROUP=64, DIM=576, MAIN=512, TAIL=64, BLOCK_H=64, INDEXERS=32, INDEX_DIM=128, BLOCK_I=32)
constants |= dict(BLOCK_C=128, BLOCK_K=64, UPCAST=False, PRECISION="tf32")
for selected in (True, False):
    constants |= dict(SELECTED=selected, TOPK=2048 * selected, GRADIENT=True, ONCE=True, BLOCK_K=32)
    compiled = ptx(indexer_kl._compare_kernel, types, constants, num_warps=4, num_stages=2 if selected else 3)
    assert "wgmma" in compiled
    ptx(indexer_kl._denominator_kernel, types, constants | dict(BLOCK_K=128), num_warps=4, num_stages=2)
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper_and_use_its_tensor_cores() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
