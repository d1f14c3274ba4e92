"""Times of an all-reduce over N ranks by NCCL, which SGLang calls for a prompt's chunks. Needs N GPUs of one host.

    python -m scripts.bench.serving.all_reduce --ranks 2 --output all_reduce.json

Tensors are `[tokens, hidden]`, bfloat16: 8,192 tokens of 6,144 are 101 MB. The bus bandwidth of n ranks is
2 (n - 1) / n x bytes / time, so that n ranks of the same links take 2 (n - 1) / n x bytes / bandwidth. One token, what
a layer sends in a decoding step, is timed in a CUDA graph; SGLang has a kernel of its own for such, which is faster.
Without a GPU ranks are processes that talk by Gloo: what they print is no time of anything.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from scripts.bench.timing import graph_ms, host_ms, median_ms

BYTES = 2  # bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--tokens", default="1,1024,4096,8192", help="of the tensors, rising")
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: expected 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (options, folder), nprocs=options.ranks)
    for size, found in json.loads(options.output.read_text())["sizes"].items():
        print(f"{size} tokens: {found['ms']:.4f} ms, {found['bus_gb_s']:.1f} GB/s", flush=True)


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast can't be used on every machine
    if on_gpu:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=options.ranks
    )
    sizes = {}
    for tokens in map(int, options.tokens.split(",")):
        tensor = torch.zeros(tokens, options.hidden, dtype=torch.bfloat16, device=f"cuda:{rank}" if on_gpu else "cpu")
        took = _took_ms(tensor, options.rounds)
        sizes[str(tokens)] = {"ms": took, "bus_gb_s": bus_gb_s(tensor.numel() * BYTES, options.ranks, took)}
    if rank == 0:
        device = torch.cuda.get_device_name() if on_gpu else "CPU"
        content = {"ranks": options.ranks, "hidden": options.hidden, "device": device, "sizes": sizes}
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    distributed.barrier()
    distributed.destroy_process_group()


def _took_ms(tensor: torch.Tensor, rounds: int) -> float:
    def call() -> Any:
        distributed.all_reduce(tensor)

    if not tensor.is_cuda:
        return median_ms(call, rounds, warm=2, clock=host_ms)
    call()  # makes the communicator, which a graph can't
    return graph_ms(call, 50) if len(tensor) == 1 else median_ms(call, rounds, warm=5)


def bus_gb_s(size: int, ranks: int, milliseconds: float) -> float:
    """Return the bus bandwidth of an all-reduce of `size` bytes, in 10^9 bytes a second."""
    return 2 * (ranks - 1) / ranks * size / milliseconds / 1e6


if __name__ == "__main__":
    main()
