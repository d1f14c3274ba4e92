"""Exact attention of neighbouring queries of few heads, each over its own selection, with shared reads and products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect_one_device
from indexcache_lab.kernels.union_attention import naive

QUERIES = (2, 4, 8)  # of a block; a byte says which of them selected a key
ROWS = 64  # queries x heads of a block at most: what a product on Hopper has at a time
TILE = 64  # room for unions is a multiple of it, and so are the tiles that kernels read


@dataclass(frozen=True)
class Unions:
    """Holds the keys that each block of neighbouring queries selected: every key once, with the queries that own it.

    Attributes:
        keys: `[B, C]`, int32: rows of the cache in ascending order, then the last of them up to a multiple of `TILE`.
        owners: `[B, C]`, uint8: bit i is set where query i of the block selected the key; 0 behind the keys.
        counts: `[B]`, int32: number of keys.
        queries: queries of a block.
        tokens: queries of all blocks; the last block may have fewer than the others.
        cache: rows that the cache has at least.
    """

    keys: Tensor
    owners: Tensor
    counts: Tensor
    queries: int
    tokens: int
    cache: int


def unite(table: Tensor, *, queries: int, cache: int, backend: Backend = "auto") -> Unions:
    """Unite the selections of each block of neighbouring queries.

    No union overflows: there is room for selections without a common key.

    Args:
        table: `[T, K]`, int32, contiguous in its columns: rows of the cache, in any order. A row that the cache does
            not have, such as -1, is none; a selection is a set, so a key that it names twice is one.
        queries: queries of a block: 2, 4 or 8.
        cache: rows of the cache.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes that on CUDA.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together, or the backend can't run them.
    """
    if table.ndim != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        raise KernelInputError(
            f"table is {list(table.shape)} of {table.dtype}, expected [T, K] of torch.int32, contiguous in columns"
        )
    if queries not in QUERIES or cache < 0:
        raise KernelInputError(f"blocks of {queries} queries over {cache} keys, expected 2, 4 or 8, and 0 keys or more")
    if runs_triton(backend, table):
        from indexcache_lab.kernels.union_attention.union import unite as run

        return run(table, queries, cache)
    return naive.unite(table, queries, cache)


def union_attention(
    q: Tensor, kv: Tensor, unions: Unions, *, scale: float, v_dim: int, out: Tensor, backend: Backend = "auto"
) -> Tensor:
    """Attend from each query to the keys that it selected, as if it did so alone.

    Keys that are not its own get no weight at all. But products are computed with them: a key or value that is not
    finite reaches all queries of a block that has it.

    Args:
        q: `[T, H, D]`, contiguous: absorbed queries, float32 or bfloat16.
        kv: `[N, D]`, contiguous, in the dtype of `q`: keys, of which the first `v_dim` dimensions are the values.
        unions: of the T queries, in blocks of 64 / H at most.
        scale: what products are multiplied by.
        v_dim: dimensions of a value: for `triton`, the largest power of two in D, and the rest is one, too.
        out: `[T, H, v_dim]`, contiguous, in the dtype of `q`; written, 0 where a query has no key.
        backend: as of `unite`.

    Returns:
        `out`.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them.
    """
    if q.ndim != 3 or 0 in q.shape[1:]:
        raise KernelInputError(f"q is {list(q.shape)}, expected [T, H, D] with heads and dimensions")
    tokens, heads, dim = q.shape
    if tokens != unions.tokens or heads * unions.queries > ROWS:
        raise KernelInputError(
            f"q is {list(q.shape)} and unions are of {unions.tokens} queries in blocks of {unions.queries}, expected"
            f" as many, and blocks of {ROWS} queries x heads at most"
        )
    if kv.ndim != 2 or kv.shape[1] != dim or len(kv) < unions.cache or not 1 <= v_dim <= dim:
        raise KernelInputError(
            f"kv is {list(kv.shape)} and values have {v_dim} dimensions, expected [{unions.cache} at least, {dim}] and"
            f" 1 to {dim}"
        )
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.dtype == kv.dtype == out.dtype:
        raise KernelInputError(
            f"q is {q.dtype}, kv {kv.dtype} and out {out.dtype}, expected float32 or bfloat16 of all"
        )
    if tuple(out.shape) != (tokens, heads, v_dim):
        raise KernelInputError(f"out is {list(out.shape)}, expected {[tokens, heads, v_dim]}")
    if not all(item.is_contiguous() for item in (q, kv, out)):
        raise KernelInputError("q, kv or out are not contiguous, expected all to be")
    expect_one_device(q, kv, unions.keys, out)
    if not len(kv):
        return out.zero_()
    if tokens and runs_triton(backend, q):
        from indexcache_lab.kernels.union_attention.triton import union_attention as run

        run(q, kv, unions, scale, out)
    elif tokens:
        naive.union_attention(q, kv, unions, scale, out)
    return out
