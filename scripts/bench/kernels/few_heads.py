"""Times of exact sparse attention of few heads a query: FlashMLA padded, SGLang's triton_sparse_mla, and unions.

    python -m scripts.bench.kernels.few_heads [--sparse-mla FOLDER/triton_sparse_mla_prefill.py]

One layer and one chunk of a prompt, absorbed MLA in bfloat16, on one GPU. Selections are synthetic: a query attends to
the 64 newest tokens, keeps a share of the other keys of the last one, and takes new ones from all that stand before the
chunk; `random` keeps none. Milliseconds are medians; errors are the largest difference from float32 on some rows, and
the largest number there. What SGLang's kernels can't run, or what is not installed, has `-` and a line.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from indexcache_lab.kernels.union_attention import ROWS, Unions, hopper, unite
from indexcache_lab.kernels.union_attention.triton import union_attention as by_triton
from sglang_indexcache.families.dsa.blocks.grouped import flash_mla_on

TOPK, DIM, V_DIM, RECENT = 2048, 576, 512, 64
SCALE = 256**-0.5
DEVICE = torch.device("cuda")
SGLANGS = "sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill"
Side = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="queries of a chunk")
    parser.add_argument("--contexts", default="32768,131072", help="keys")
    parser.add_argument("--heads", default="8,16", help="heads of a rank")
    parser.add_argument("--kept", default="0.95,0.8,0.6,0.3,0", help="shares of the last query's keys that are kept")
    parser.add_argument("--milliseconds", type=int, default=40, help="how long each side is timed")
    parser.add_argument("--sparse-mla", type=Path, help="file of SGLang's kernel, where sglang can't be imported")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}", flush=True)
    flash, sparse_mla = flash_mla_on(DEVICE), sglangs(options.sparse_mla)
    adversary()
    for heads in map(int, options.heads.split(",")):
        for context in map(int, options.contexts.split(",")):
            q, kv = normal(options.rows, heads, DIM), normal(context, DIM)
            for kept in map(float, options.kept.split(",")):
                table = selections(options.rows, context, kept)
                compare(q, kv, table, kept, flash, sparse_mla, options.milliseconds)


def sglangs(path: Path | None) -> Callable[..., Tensor] | None:
    """Return SGLang's kernel from its module, or from a file; `None` with a line where there is neither."""
    try:
        if path is None:
            module: Any = importlib.import_module(SGLANGS)
        else:
            spec = importlib.util.spec_from_file_location("sparse_mla", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        print(f"triton_sparse_mla is left out: {error}")
        return None
    found: Callable[..., Tensor] = module.sparse_mla_prefill
    return found


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def selections(rows: int, context: int, kept: float, topk: int = TOPK) -> Tensor:
    """Return `[rows, topk]`, int32, of queries at the end of the context: no key twice in a row, in no order.

    Each column but the recent ones has keys of its own, so that no draw needs to look at another.
    """
    columns = topk - RECENT
    turns = torch.arange(rows, device=DEVICE)[:, None]
    fresh = torch.rand(rows, columns, device=DEVICE) >= kept
    drawn = torch.where(fresh, turns, 0).cummax(0).values  # when the key of a column was taken
    number = torch.randint(0, (context - rows - RECENT) // columns, (rows, columns), device=DEVICE).gather(0, drawn)
    keys = number * columns + torch.arange(columns, device=DEVICE)
    recent = context - rows + turns - torch.arange(RECENT, device=DEVICE)
    table = torch.cat([keys, recent], 1).int()
    return table[:, torch.randperm(topk, device=DEVICE)].contiguous()


def reference(q: Tensor, kv: Tensor, table: Tensor) -> Tensor:
    """Attend in float32, a few rows at a time, 0 without keys."""
    found = []
    for rows, chosen in zip(q.split(64), table.split(64), strict=True):
        keys = kv[chosen.long().clamp_min(0)].float()
        scores = torch.einsum("thd,tkd->thk", rows.float(), keys) * SCALE
        weights = scores.masked_fill((chosen < 0)[:, None], -torch.inf).softmax(2).nan_to_num(0.0)
        found.append(torch.einsum("thk,tkd->thd", weights, keys[..., :V_DIM]))
    return torch.cat(found)


def ours(q: Tensor, kv: Tensor, unions: Unions) -> dict[str, Side]:
    """Return the kernels over unions; each writes a result of its own."""
    out = q.new_empty(*q.shape[:2], V_DIM)

    def run(kernel: Callable[..., None]) -> Tensor:
        kernel(q, kv, unions, SCALE, out)
        return out

    sides: dict[str, Side] = {"unions, Triton": partial(run, by_triton)}
    if hopper.fits(q, V_DIM):
        sides["unions, Gluon"] = partial(run, hopper.union_attention)
    return sides


def compare(
    q: Tensor, kv: Tensor, table: Tensor, kept: float, flash: Any, sparse_mla: Callable[..., Tensor] | None, spent: int
) -> None:
    """Print the times and errors of all sides on one selection."""
    heads = q.shape[1]
    some = torch.cat([torch.arange(128), torch.arange(len(q) - 128, len(q))]).to(DEVICE)
    wanted = reference(q[some], kv, table[some])
    sides: dict[str, Side] = {}
    if flash is not None:
        sides["FlashMLA, padded"] = lambda: flash(q, kv, table, SCALE, TOPK, V_DIM)[0][:, :heads]
    if sparse_mla is not None:
        lengths = torch.full((len(q),), TOPK, dtype=torch.int32, device=DEVICE)
        for union in (0, 2, 4):
            if union in (0, 32 // heads, 16 // heads):  # what SGLang takes; else it would fall back by itself
                sides[f"triton_sparse_mla, union {union}"] = partial(
                    sparse_mla, q, kv, table, SCALE, V_DIM, topk_length=lengths, union=union
                )
    name = f"{kept:.0%} kept" if kept else "random"
    print(f"\n{heads} heads, {len(kv)} keys, {name}\n| side | ms | error |\n| -- | -: | -: |", flush=True)
    uniting = partial(unite, table, queries=ROWS // heads, cache=len(kv))
    unions = uniting()
    mean = statistics.mean(unions.counts.tolist())
    line = f"{mean:.0f} keys, {mean / TOPK:.2f} selections, at most {int(unions.counts.max())}"
    print(f"| unite, blocks of {unions.queries}: {line} | {milliseconds(uniting, spent):.3f} | |", flush=True)
    sides |= ours(q, kv, unions)
    for side, call in sides.items():
        try:
            error = f"{float((call()[some].float() - wanted).abs().max()):.1e} of {float(wanted.abs().max()):.2f}"
            print(f"| {side} | {milliseconds(call, spent):.3f} | {error} |", flush=True)
        except Exception as failure:  # one side that can't run must not cost the others
            print(f"| {side} | - | {type(failure).__name__}: {str(failure).splitlines()[0][:150]} |", flush=True)


def milliseconds(call: Callable[[], Any], spent: int) -> float:
    found = do_bench(call, warmup=spent // 3, rep=spent, return_mode="median")
    assert isinstance(found, float)
    return found


def adversary() -> None:
    """Print the errors of the kernels where rows end early, are empty, and don't fill a block."""
    for heads in (8, 16, 32):
        q, kv, table = normal(1003, heads, DIM), normal(16384, DIM), selections(1003, 16384, 0.7)
        table = torch.where(torch.rand(1003, 1, device=DEVICE) * 2100 > torch.arange(TOPK, device=DEVICE), table, -1)
        table[64:80], table[-3] = -1, -1
        unused = torch.ones(len(kv), dtype=torch.bool, device=DEVICE)
        unused[table[table >= 0].long()] = False
        kv[unused] = torch.nan
        wanted = reference(q, torch.where(unused[:, None], 0, kv), table)
        for name, call in ours(q, kv, unite(table, queries=ROWS // heads, cache=len(kv))).items():
            try:
                print(f"adversary, {heads} heads, {name}: error {float((call().float() - wanted).abs().max()):.1e}")
            except Exception as failure:  # as in compare
                print(f"adversary, {heads} heads, {name}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)


if __name__ == "__main__":
    main()
