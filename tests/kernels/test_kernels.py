"""Kernels against their definitions; under Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from indexcache_kernels import KernelInputError, sparse_attention
from indexcache_kernels.sparse_attention import flash_mla
from indexcache_train.kernels import indexer_kl
from indexcache_train.kernels import sparse_attention as with_gradients
from indexcache_train.kernels.indexer_kl import naive as naive_kl
from indexcache_train.kernels.indexer_kl import visible_keys
from tests.kernels.interpreter import DEVICE, INTERPRETED, KERNELS, poisoned
from tests.kernels.test_indexer_topk import causal

__all__ = ["poisoned"]  # a fixture of every test here


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
        out, lse = with_gradients(q, k, 512, indices, 0.05, backend="triton")
        _, loss = indexer_kl(q, k, lse, 0.05, index_q, index_k, weights, indices=indices)
        return [out, lse, torch.autograd.grad(out.float().sum(), q)[0], loss]

    first = run()
    for _ in range(100):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))


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
    out, lse = with_gradients(q, k, v_dim if in_keys else v, indices, dim**-0.5, backend="triton")
    with torch.no_grad():
        alone = sparse_attention(q, k, v_dim if in_keys else v, indices, dim**-0.5, backend="triton")
    assert torch.equal(alone[0], out) and torch.equal(alone[1], lse)
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
        assert (with_gradients(q, k, v, indices, 1.0, backend="triton")[0] == 0).all()


def test_the_definition_attends_to_gathered_keys() -> None:
    """Block by block of queries, with gradients; the third query selects nothing, the fourth two keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((300, 6, 8), (310, 3, 8), (310, 3, 5))
    )
    indices = torch.stack([torch.randperm(310, generator=generator)[:20] for _ in range(300)]).int()
    near = [torch.randperm(40, generator=generator)[:20] + 50 for _ in range(172)]
    indices[128:] = torch.stack(near).int()  # blocks of queries whose keys lie together
    indices[2], indices[3, 2:] = -1, -1
    out, lse = sparse_attention(q, k, v, indices, 0.3, backend="naive")
    for row, chosen in enumerate(indices):
        kept = chosen[chosen >= 0].long()
        scores = torch.einsum("gjd,lgd->gjl", q[row].view(3, 2, 8), k[kept]) * 0.3
        expected = torch.einsum("gjl,lgv->gjv", scores.softmax(2), v[kept]).reshape(6, 5)
        torch.testing.assert_close(out[row], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[row], scores.logsumexp(2).flatten(), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda *given: sparse_attention(*given, indices[126:130], 0.3, backend="naive")[0],
        (q[126:130].detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()),
        fast_mode=True,
    )


def test_sparse_attention_says_what_does_not_fit() -> None:
    q, k, indices = torch.zeros(2, 3, 16), torch.zeros(5, 2, 16), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(KernelInputError, match="q has 3 heads, expected a multiple of the 2 of k"):
        sparse_attention(q, k, k, indices, 1.0)
    with pytest.raises(KernelInputError, match="expected one dtype"):
        sparse_attention(q[:, :2], k.bfloat16(), k, indices, 1.0)
    with pytest.raises(KernelInputError, match=r"expected \[2, K\] of torch.int32"):
        sparse_attention(q[:, :2], k, k, indices.long(), 1.0)


@pytest.mark.parametrize("of", range(3), ids="qkv")
def test_no_kernel_runs_where_a_gradient_is_needed(of: int) -> None:
    q, indices = torch.zeros(2, 4, 16, device=DEVICE), torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    given = [q, torch.zeros(5, 2, 16, device=DEVICE), torch.zeros(5, 2, 24, device=DEVICE)]
    given[of].requires_grad_()
    line = r"^q, k or v needs a gradient, and triton has none here; expected torch\.no_grad\(\), backend naive, or .*$"
    with pytest.raises(KernelInputError, match=line):
        sparse_attention(*given, indices, 1.0, backend="triton")  # type: ignore[arg-type]
    with torch.no_grad():
        assert not sparse_attention(*given, indices, 1.0, backend="triton")[0].requires_grad  # type: ignore[arg-type]
    out, _ = sparse_attention(*given, indices, 1.0, backend="naive")  # type: ignore[arg-type]
    assert torch.autograd.grad(out.sum(), given[of])[0].shape == given[of].shape


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
        out, lse = with_gradients(*leaves, 512, indices, 0.04, backend=backend)  # type: ignore[arg-type]
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
    [(8, 1, 80, 4, 32, 130), (6, 3, 24, 3, 24, 111), (4, 1, 24, 4, 16, 520)],
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
from indexcache_kernels.indexer_topk.splits import merge_kernel, sample_kernel
from indexcache_kernels.indexer_topk.triton import _stream_kernel
from indexcache_train.kernels.indexer_kl import triton as indexer_kl
from indexcache_dense.kernels.rounded_keys import triton as rounded_keys
from indexcache_train.kernels.attention_gradients.hopper_kernel import backward_kernel
from indexcache_train.kernels.attention_gradients.triton import _backward_kernel
from indexcache_kernels.sparse_attention.triton import _forward_kernel
from triton.experimental.gluon._runtime import GluonASTSource

def build(kernel, types, constants, source=ASTSource, aligned=(), **options):
    names = kernel.arg_names
    signature = {name: types.get(name.removesuffix("_ptr"), "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in constants.items() if name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = source(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

def ptx(*arguments, **options):
    return build(*arguments, **options).asm["ptx"]

integers = ("starts", "ends", "marks", "candidates", "counts", "result", "queue", "todo", "before", "merged")
integers += ("merged_counts",)
numbers = dict.fromkeys(("num_queries", "num_blocks"), "i32")
common = {**dict.fromkeys(integers, "*i32"), "scores": "*fp32", "bounds": "*fp32", "sample": "*fp32", **numbers}
key, variants = sys.argv[1:]
some = slice(-1 if variants == "one" else 0, None)
types = {**common, "q": "*" + key, "k": "*" + key, "weights": "*fp32", "k_scale": "*fp32"}
constants = dict(HEADS=64, PADDED_HEADS=64, DIM=128, PADDED_DIM=128, BLOCK_K=64, SEGMENT=1024, SAMPLE=4096)
constants |= dict(STEPS=6, CHUNK=128, TOPK=2048, ROOM=4096, PARTS=16, SCALED=key == "fp8e4nv")
constants |= dict(PRECISION="tf32", UPCAST=False)
for splits, block_q in ((1, 2), (2, 1))[some]:
    one = constants | dict(SPLITS=splits, BLOCK_Q=block_q)
    assert "wgmma" in ptx(_stream_kernel, types, one, num_warps=4, num_stages=3, maxnreg=128), key
assert "wgmma" in ptx(sample_kernel, types, one, num_warps=4, num_stages=3), key
ptx(merge_kernel, common, constants | dict(SPLITS=6, PADDED_SPLITS=8, STEPS=3), num_warps=8)
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
aligned = [name for name in backward_kernel.arg_names if name.endswith("_ptr") or name == "k_row_stride"]
sizes = constants | dict(BLOCK_H=64, BLOCK_K=64, CHUNK=128)
found = build(backward_kernel, types | dict(sums="*fp32"), sizes, GluonASTSource, aligned, num_warps=8)
assert found.metadata.shared <= 227 * 1024 and found.asm["ptx"].count("wgmma.mma_async") == 124
assert found.asm["ptx"].count("relaxed.add.v4.f32") == 36 and found.asm["ptx"].count("cp.async.cg") == 36
types = {**types, **common, "loss": "*fp32", "index_lse": "*fp32", "d_loss": "*fp32", "weights": "*fp32"}
types |= {"index_q": "*bf16", "index_k": "*bf16", "d_q": "*bf16", "d_weights": "*fp32"}
constants = dict(HEADS=64, GROUP=64, DIM=576, MAIN=512, TAIL=64, BLOCK_H=64, INDEXERS=32, INDEX_DIM=128, BLOCK_I=32)
constants |= dict(BLOCK_C=128, BLOCK_K=64, UPCAST=False, PRECISION="tf32")
for selected in (False, True)[some]:
    constants |= dict(SELECTED=selected, TOPK=2048 * selected, GRADIENT=True, ONCE=True, BLOCK_K=32)
    compiled = ptx(indexer_kl._compare_kernel, types, constants, num_warps=4, num_stages=2 if selected else 3)
    assert "wgmma" in compiled
    ptx(indexer_kl._denominator_kernel, types, constants | dict(BLOCK_K=128), num_warps=4, num_stages=2)
types = {"k": "*bf16", "q": "*bf16", "codes": "*u8", "ranges": "*fp16", "scale": "fp32"}
types |= dict.fromkeys(("table", "starts", "lengths", "requests", "steps"), "*i32")
types |= dict.fromkeys(("parts", "highest", "total", "out"), "*fp32")
types |= dict.fromkeys(("slots", "k_slot_stride", "k_head_stride", "table_stride"), "i32")
types |= dict.fromkeys(("out_stride", "num_heads", "room"), "i32")
sizes = dict(KV_HEADS=4, GROUP=7, HALF=64, BLOCK_D=64, BLOCK_H=8, TABLE_PAGE=1, LISTED=True, EVERY=0, PAGE=16, UNIT=16)
sizes |= dict(PARTS=20, BUDGET=64, TILE=64, UPCAST=False, PRECISION="tf32", FAST=True)
for query in ("*fp16", "*bf16")[some]:
    given = types | dict(q=query, ranges="*i32")
    compiled = ptx(rounded_keys._shares_kernel, given, sizes, num_warps=2, num_stages=2)
    assert "mma.sync" in compiled and "lg2.approx" in compiled and "prmt" in compiled
    assert "cvt.rn.f32.u8" not in compiled and "cvt.rn.bf16" not in compiled
ptx(rounded_keys._largest_kernel, types, sizes | dict(TILE_N=32, INSIDE=1, BLOCK_P=32), num_warps=1)
ptx(rounded_keys._round_kernel, types, sizes | dict(TILE=32, LEVELS=15, NEWEST=False, SPLITS=4))
"""


ALL = [pytest.param(keys, "all", marks=pytest.mark.slow) for keys in ("fp8e4nv", "bf16")]


@pytest.mark.parametrize(("keys", "variants"), [("fp8e4nv", "one"), *ALL])
def test_kernels_compile_for_hopper_and_use_its_tensor_cores(keys: str, variants: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, keys, variants]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
