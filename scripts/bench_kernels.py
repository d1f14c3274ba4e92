"""How fast are the kernels, and how much memory do they take? One table, on one CUDA device.

    python -m scripts.bench_kernels --lengths 8192,32768,65536,131072 --heads 32,64

indexer_topk on one causal sequence, dim 128, k 2048, against DeepGEMM's fp8_mqa_logits followed by sgl_kernel's
fast_topk_v2, as SGLang runs them (rows in chunks), where they are installed, and against PyTorch.
Time: median of CUDA events; memory: peak above the inputs. The share of the roofline is that of the score products
alone at the dense rate of the datasheet (NVIDIA H100 and H200 SXM: 989 TFLOP/s in bfloat16, 1,979 in float8).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels import causal_ranges, indexer_topk

RATES = {torch.bfloat16: 989e12, torch.float8_e4m3fn: 1979e12}
DIM = 128
CHUNK = 8192  # rows of SGLang's chunked prefill


def inputs(length: int, heads: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """One causal sequence; quantised keys have a scale for each row."""
    generator = torch.Generator(device).manual_seed(length + heads)
    q = torch.randn(length, heads, DIM, device=device, generator=generator)
    k = torch.randn(length, DIM, device=device, generator=generator)
    weights = torch.randn(length, heads, device=device, generator=generator)
    starts, ends = causal_ranges(torch.tensor([0, length], device=device))
    found = {"q": q.to(dtype), "k": k.to(dtype), "weights": weights, "starts": starts, "ends": ends}
    if dtype == torch.float8_e4m3fn:
        scale = k.abs().amax(1) / 448
        found |= {"k": (k / scale[:, None]).to(dtype), "k_scale": scale}
    return found


def deep_gemm_topk(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, k_scale: Tensor
) -> Tensor:
    """DeepGEMM's scores and sgl_kernel's selection; relative to the first key, in no order."""
    import deep_gemm
    from sgl_kernel import fast_topk_v2

    found = []
    for first in range(0, len(q), CHUNK):
        rows = slice(first, first + CHUNK)
        logits = deep_gemm.fp8_mqa_logits(
            q[rows], (k, k_scale), weights[rows], starts[rows], ends[rows], clean_logits=False
        )
        found.append(fast_topk_v2(logits, ends[rows] - starts[rows], topk, row_starts=starts[rows]))
    return torch.cat(found)


def torch_topk(q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    """PyTorch, as many rows at a time as give 4 GB of products."""
    step = max(1, (4 << 30) // (q.shape[1] * len(k) * 4))
    keys, found = torch.arange(len(k), device=k.device), []
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        products = torch.einsum("thd,ld->thl", q[rows], k).relu().float()
        scores = torch.einsum("thl,th->tl", products, weights[rows])
        found.append(scores.masked_fill(keys >= ends[rows, None], -torch.inf).topk(topk, sorted=False).indices)
    return torch.cat(found)


def measure(call: Callable[[], Tensor], repeats: int) -> tuple[float, float]:
    """Median milliseconds, and peak memory above what was there in MiB."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**20


def variants(given: dict[str, Any], topk: int, plain: bool) -> dict[str, Callable[[], Tensor]]:
    """What can run on these inputs."""
    found: dict[str, Callable[[], Tensor]] = {"indexer_topk": lambda: indexer_topk(**given, topk=topk)}
    if "k_scale" in given:
        try:
            import deep_gemm
            import sgl_kernel
        except ImportError:
            return found
        if deep_gemm and sgl_kernel:
            found["DeepGEMM + fast_topk"] = lambda: deep_gemm_topk(**given, topk=topk)
    elif plain:
        found["PyTorch"] = lambda: torch_topk(**given, topk=topk)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="8192,32768,65536,131072")
    parser.add_argument("--heads", default="32,64")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain-up-to", type=int, default=32768, help="longest length for PyTorch")
    parser.add_argument("--output", type=Path, default=Path("bench_kernels.json"))
    options = parser.parse_args()
    results = []
    print("| dtype | heads | length | implementation | ms | TFLOP/s | of the roofline | MiB |")
    print("|---|---:|---:|---|---:|---:|---:|---:|")
    for dtype, rate in RATES.items():
        for heads in map(int, options.heads.split(",")):
            for length in map(int, options.lengths.split(",")):
                given = inputs(length, heads, dtype, "cuda")
                operations = length * (length + 1) * heads * DIM  # a multiplication and an addition for each pair
                for name, call in variants(given, options.topk, length <= options.plain_up_to).items():
                    milliseconds, memory = measure(call, options.repeats)
                    reached = operations / milliseconds * 1e3
                    results.append(
                        {
                            "dtype": str(dtype),
                            "heads": heads,
                            "length": length,
                            "name": name,
                            "ms": milliseconds,
                            "mib": memory,
                        }
                    )
                    print(
                        f"| {str(dtype).removeprefix('torch.')} | {heads} | {length:,} | {name} | {milliseconds:.2f} |"
                        f" {reached / 1e12:.0f} | {reached / rate:.0%} | {memory:,.0f} |",
                        flush=True,
                    )
    about = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: _version(name) for name in ("torch", "triton", "sglang-kernel")},
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
