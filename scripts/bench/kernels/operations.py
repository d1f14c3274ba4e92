"""Times and memory of the kernels beside other implementations: one table, on one CUDA device.

    python -m scripts.bench.kernels.operations
    python -m scripts.bench.kernels.operations --operations sparse_attention --lengths 65536 --heads 64,128

indexer_topk: one causal sequence, dim 128, k 2048; against DeepGEMM's fp8_mqa_logits followed by sgl_kernel's
fast_topk_v2, whole and in chunks of queries as SGLang calls them, where they are installed, and against PyTorch.
chunk: the last 8,192 queries alone, of random scores and of equal ones; also with FlashInfer's exact selection, and 528
queries at a time. decoding: 8 and 64 requests of `length` keys each, as CUDA graphs; DeepGEMM's scores are paged.
sparse_attention: absorbed MLA (576 and 512 dimensions), 4,096 queries of k 2048 random keys each; against FlashMLA and
PyTorch; its backward, and the one for Hopper where that fits, against PyTorch's autograd and cuDNN's, where it is
installed. indexer_kl: against PyTorch.

Time: median of CUDA events; memory: peak above the inputs. The share of the roofline is the larger of operations over
the dense rate and of bytes over the bandwidth of the datasheet, over the time; inputs and results count once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels import causal_ranges, indexer_topk, sparse_attention
from indexcache_kernels.sparse_attention import flash_mla
from indexcache_train.kernels import indexer_kl
from indexcache_train.kernels import sparse_attention as with_gradients
from indexcache_train.kernels.attention_gradients import hopper
from scripts.bench.kernels import cudnn_dsa
from scripts.bench.kernels.deep_gemm_topk import Decoding, fast_topk, flashinfer_topk
from scripts.bench.kernels.deep_gemm_topk import indexer_topk as deep_gemm_topk
from scripts.bench.timing import captured, median_ms

RATES = {torch.bfloat16: 989e12, torch.float8_e4m3fn: 1979e12, torch.int32: 989e12}  # NVIDIA H100 and H200 SXM
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}
TOPK, INDEX_DIM, DIM, V_DIM = 2048, 128, 576, 512
CHUNK = 8192  # rows of SGLang's chunked prefill
QUERIES = 4096
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "nvidia-cudnn-frontend")


@dataclass(frozen=True)
class Case:
    """An implementation on given inputs: what to call, how many operations it must do and bytes it must move."""

    operation: str
    dtype: torch.dtype
    heads: int
    length: int
    name: str
    call: Callable[[], Any]
    operations: float
    bytes: float


def size(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def index_inputs(length: int, heads: int, dtype: torch.dtype, queries: int | None = None) -> dict[str, Any]:
    """Draw one causal sequence, and as many queries or fewer; quantised keys have a scale for each row."""
    generator = torch.Generator("cuda").manual_seed(length + heads)
    q = torch.randn(queries or length, heads, INDEX_DIM, device="cuda", generator=generator)
    k = torch.randn(length, INDEX_DIM, device="cuda", generator=generator)
    weights = torch.randn(queries or length, heads, device="cuda", generator=generator)
    starts, ends = causal_ranges(torch.tensor([0, length], device="cuda"))
    found = {"q": q.to(dtype), "k": k.to(dtype), "weights": weights, "starts": starts, "ends": ends}
    if dtype == torch.float8_e4m3fn:
        scale = k.abs().amax(1) / 448
        found |= {"k": (k / scale[:, None]).to(dtype), "k_scale": scale}
    return found


def torch_topk(q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Select by PyTorch, as many rows at a time as give 4 GB of products."""
    step = max(1, (4 << 30) // (q.shape[1] * len(k) * 4))
    keys, found = torch.arange(len(k), device=k.device), []
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        products = torch.einsum("thd,ld->thl", q[rows], k).relu().float()
        scores = torch.einsum("thl,th->tl", products, weights[rows])
        found.append(scores.masked_fill(keys >= ends[rows, None], -torch.inf).topk(TOPK, sorted=False).indices)
    return torch.cat(found)


def topk_cases(length: int, heads: int, plain: bool) -> Iterator[Case]:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        given = index_inputs(length, heads, dtype)
        operations = length * (length + 1) * heads * INDEX_DIM  # a multiplication and an addition for each pair
        least = size(*given.values()) + 4 * length * TOPK
        calls: dict[str, Callable[[], Tensor]] = {"indexer_topk": partial(indexer_topk, **given, topk=TOPK)}
        if dtype == torch.float8_e4m3fn:
            if installed("deep_gemm", "sgl_kernel"):
                calls["DeepGEMM + fast_topk"] = partial(deep_gemm_topk, **given, rows=length)
                calls["DeepGEMM + fast_topk, 8K rows"] = partial(deep_gemm_topk, **given, rows=CHUNK)
        elif plain:
            calls["PyTorch"] = partial(torch_topk, **given)
        for name, call in calls.items():
            yield Case("indexer_topk", dtype, heads, length, name, call, operations, least)


def chunk_cases(length: int, heads: int, plain: bool) -> Iterator[Case]:
    """Yield selections as SGLang makes them in a long prompt."""
    given = index_inputs(length, heads, torch.float8_e4m3fn)
    last = {name: tensor if name in ("k", "k_scale") else tensor[-CHUNK:] for name, tensor in given.items()}
    for kind in ("random", "all equal"):
        inputs = last if kind == "random" else {**last, "weights": torch.zeros_like(last["weights"])}
        calls: dict[str, Callable[[], Any]] = {"indexer_topk": partial(indexer_topk, **inputs, topk=TOPK)}
        calls["indexer_topk, 8192 keys"] = partial(indexer_topk, **inputs, topk=8192)
        if installed("deep_gemm", "sgl_kernel"):
            for rows in (CHUNK, 528):
                calls[f"DeepGEMM + fast_topk, {rows}"] = partial(deep_gemm_topk, **inputs, rows=rows)
                if installed("flashinfer"):
                    calls[f"DeepGEMM + FlashInfer, {rows}"] = partial(
                        deep_gemm_topk, **inputs, rows=rows, select=flashinfer_topk
                    )
        operations = 2 * CHUNK * length * heads * INDEX_DIM
        for name, call in calls.items():
            least = size(*inputs.values()) + 4 * CHUNK * TOPK
            yield Case("chunk", torch.float8_e4m3fn, heads, length, f"{kind}, {name}", call, operations, least)


def decoding_cases(length: int, heads: int, plain: bool) -> Iterator[Case]:
    """Yield selections for requests with keys of their own."""
    for batch in (8, 64):
        given = index_inputs(batch * length, heads, torch.float8_e4m3fn, batch)
        given["starts"] = torch.arange(batch, dtype=torch.int32, device="cuda") * length
        given["ends"] = given["starts"] + length
        calls: dict[str, Callable[[], Any]] = {"indexer_topk": partial(indexer_topk, **given, topk=TOPK)}
        calls["indexer_topk, 8192 keys"] = partial(indexer_topk, **given, topk=8192)
        if installed("deep_gemm", "sgl_kernel"):
            stock = Decoding(given["q"], given["k"], given["weights"], given["k_scale"])
            calls["DeepGEMM + fast_topk"] = partial(stock, fast_topk)
            if installed("flashinfer"):
                calls["DeepGEMM + FlashInfer"] = partial(stock, flashinfer_topk)
        operations, least = 2 * batch * length * heads * INDEX_DIM, size(*given.values()) + 4 * batch * TOPK
        for name, call in calls.items():
            run = captured(call)
            yield Case("decoding", torch.float8_e4m3fn, heads, length, f"{batch} x {name}", run, operations, least)


def random_keys(queries: int, length: int) -> Tensor:
    """Draw different keys for each query, ascending."""
    generator = torch.Generator("cuda").manual_seed(length)
    parts = []
    for _ in range(0, queries, 1024):
        order = torch.rand(1024, length, device="cuda", generator=generator).topk(min(TOPK, length), dim=1).indices
        parts.append(order.int().sort(dim=1).values)
    return torch.cat(parts)[:queries]


def attention_inputs(length: int, heads: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(length + heads)
    q = torch.randn(QUERIES, heads, DIM, device="cuda", generator=generator).bfloat16()
    k = torch.randn(length, 1, DIM, device="cuda", generator=generator).bfloat16()
    return {"q": q, "k": k, "v": V_DIM, "indices": random_keys(QUERIES, length), "scale": DIM**-0.5}


def torch_attention(q: Tensor, k: Tensor, v: int, indices: Tensor, scale: float) -> Tensor:
    """Attend by PyTorch to gathered copies, 512 queries at a time."""
    found = []
    for queries, chosen in zip(q.split(512), indices.split(512), strict=True):
        keys = k[chosen, 0]
        weights = (torch.einsum("thd,tkd->thk", queries, keys).float() * scale).softmax(dim=2)
        found.append(torch.einsum("thk,tkd->thd", weights.to(k.dtype), keys[..., :v]))
    return torch.cat(found)


def attention_cases(length: int, heads: int, plain: bool) -> Iterator[Case]:
    given = attention_inputs(length, heads)
    q, k, indices = given["q"], given["k"], given["indices"]
    pairs = QUERIES * indices.shape[1] * heads
    operations, least = 2 * pairs * (DIM + V_DIM), size(q, k, indices) + pairs // indices.shape[1] * V_DIM * 2
    calls: dict[str, Callable[[], Any]] = {
        "sparse_attention": lambda: sparse_attention(**given, backend="triton")[0],
    }
    if flash_mla.fits(q, k, V_DIM):
        calls["sparse_attention on FlashMLA"] = lambda: sparse_attention(**given)[0]
        calls["FlashMLA"] = lambda: flash_mla.forward(q, k, indices, given["scale"])[0]
    calls["PyTorch"] = lambda: torch_attention(**given)
    for name, call in calls.items():
        yield Case("sparse_attention", q.dtype, heads, length, name, call, operations, least)
    above = torch.randn(QUERIES, heads, V_DIM, device="cuda").bfloat16()
    leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
    trained = {**given, "q": leaves[0], "k": leaves[1]}
    operations, least = pairs * (6 * DIM + 4 * V_DIM), 2 * least + size(above)
    forwards = {
        "sparse_attention": lambda: with_gradients(**trained, backend="triton")[0],
        "PyTorch": lambda: torch_attention(**trained),
    }
    if hopper.fits(q, k, V_DIM):
        forwards["sparse_attention for Hopper"] = lambda: with_gradients(**trained)[0]
    for name, forward in forwards.items():
        out = forward()
        yield Case(
            "sparse_attention backward",
            q.dtype,
            heads,
            length,
            name,
            partial(torch.autograd.grad, out, leaves, above, retain_graph=True),
            operations,
            least,
        )
        del out
    refused = cudnn_dsa.refusal()
    if refused:
        _say(refused)
        return
    out, lse = sparse_attention(**given, backend="triton")
    call = partial(cudnn_dsa.gradients, q, k, indices, out, lse, above, given["scale"])
    yield Case("sparse_attention backward", q.dtype, heads, length, "cuDNN", call, operations, least)


def kl_cases(length: int, heads: int, plain: bool) -> Iterator[Case]:
    """Yield losses over selected keys with 32 index heads, forward and backward."""
    given, index = attention_inputs(length, heads), index_inputs(QUERIES, 32, torch.bfloat16)
    q, k, indices = given["q"], given["k"], given["indices"]
    index_k = torch.randn(length, INDEX_DIM, device="cuda").bfloat16().requires_grad_()
    index_q, weights = index["q"].requires_grad_(), index["weights"].mul(0.05).requires_grad_()
    lse = sparse_attention(**given, backend="triton")[1]

    def ours() -> Any:
        total, _ = indexer_kl(q, k, lse, given["scale"], index_q, index_k, weights, indices=indices)
        return torch.autograd.grad(total, (index_q, index_k, weights))

    def plain_torch() -> Any:
        total = torch.zeros((), device="cuda")
        for rows in torch.arange(QUERIES, device="cuda").split(256):
            keys, vectors = k[indices[rows], 0], index_k[indices[rows]]
            products = torch.einsum("thd,tkd->thk", q[rows], keys).float() * given["scale"]
            target = products.softmax(dim=2).mean(dim=1)
            scores = torch.einsum("thd,tkd->thk", index_q[rows], vectors).relu().float()
            index_scores = torch.einsum("thk,th->tk", scores, weights[rows]).log_softmax(dim=1)
            total = total + (target * (target.log() - index_scores)).sum()
        return torch.autograd.grad(total, (index_q, index_k, weights))

    pairs = QUERIES * indices.shape[1]
    operations = 2 * pairs * (heads * DIM + 32 * INDEX_DIM * 3)
    least = size(q, k, indices, index_q, index_k, weights) + size(index_q, index_k, weights)
    for name, call in {"indexer_kl": ours, "PyTorch": plain_torch}.items():
        yield Case("indexer_kl with gradients", q.dtype, heads, length, name, call, operations, least)


CASES = {
    "indexer_topk": topk_cases,
    "chunk": chunk_cases,
    "decoding": decoding_cases,
    "sparse_attention": attention_cases,
    "indexer_kl": kl_cases,
}


def measure(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return median milliseconds, and peak memory above the present one in MiB."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    milliseconds = median_ms(call, repeats, warm=0)
    return milliseconds, (torch.cuda.max_memory_allocated() - before) / 2**20


@cache
def _say(line: str) -> None:
    """Print a line once, beside the table."""
    print(line, file=sys.stderr)


def installed(*names: str) -> bool:
    try:
        for name in names:
            __import__(name)
    except ImportError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", default=",".join(CASES))
    parser.add_argument("--lengths", default="8192,32768,65536,131072")
    parser.add_argument("--heads", default="32,64", help="of the indexer, or of the attention")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain-up-to", type=int, default=32768, help="longest length for PyTorch's slowest")
    parser.add_argument("--output", type=Path, default=Path("bench_kernels.json"))
    options = parser.parse_args()
    device = torch.cuda.get_device_name()
    bandwidth = next((rate for name, rate in BANDWIDTHS.items() if name in device), None)
    results = []
    print("| operation | dtype | heads | length | implementation | ms | TFLOP/s | of the roofline | MiB |")
    print("|---|---|---:|---:|---|---:|---:|---:|---:|")
    for operation in options.operations.split(","):
        all_heads = [int(item) for item in options.heads.split(",")]
        for heads in all_heads:
            for length in map(int, options.lengths.split(",")):
                for case in CASES[operation](length, heads, length <= options.plain_up_to):
                    try:
                        milliseconds, memory = measure(case.call, options.repeats)
                    except torch.OutOfMemoryError:
                        milliseconds = memory = float("nan")
                    floor = 1e3 * max(case.operations / RATES[case.dtype], case.bytes / (bandwidth or float("inf")))
                    row = {
                        "operation": case.operation,
                        "dtype": str(case.dtype).removeprefix("torch."),
                        "heads": case.heads,
                        "length": case.length,
                        "name": case.name,
                        "ms": milliseconds,
                        "tflops": case.operations / milliseconds / 1e9,
                        "roofline": floor / milliseconds,
                        "mib": memory,
                    }
                    results.append(row)
                    print(
                        f"| {case.operation} | {row['dtype']} | {case.heads} | {case.length:,} | {case.name}"
                        f" | {milliseconds:.2f} | {row['tflops']:.0f} | {row['roofline']:.0%} | {memory:,.0f} |",
                        flush=True,
                    )
                torch.cuda.empty_cache()
    about = {
        "device": device,
        "versions": {name: _version(name) for name in PACKAGES},
    }
    options.output.write_text(
        json.dumps({**about, "options": vars(options), "results": results}, default=str, indent=1) + "\n"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
