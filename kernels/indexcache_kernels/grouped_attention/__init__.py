"""Sparse attention of blocks of queries that share most of their keys: one query of many rows for each block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect_one_device
from indexcache_kernels.grouped_attention import naive

Attend = Callable[[Tensor, Tensor, Tensor, float, int, int], tuple[Tensor, Tensor]]
"""Attends from `[B, R, D]` to the rows `[B, K]` of `[N, D]`; then come what products are multiplied by, how many of the
K columns count, and V. Gives `[B, at least R, V]` and base-2 logarithms of the denominators, -inf without a key."""


def grouped_attention(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    *,
    queries: int,
    own: int | None = None,
    seen: Tensor | None = None,
    scale: float,
    v_dim: int,
    out: Tensor,
    attend: Attend = naive.attend,
    backend: Backend = "auto",
) -> Tensor:
    """Attend from the queries of blocks to the keys in their rows of `table`, as if each query did so alone.

    The queries of a block have the same keys in the first K - `own` columns, and in the others the tokens of their
    block up to themselves. So the first part is attended to once a block, from all its queries and heads together; the
    other part is added in one kernel, which puts both together by their denominators.

    Args:
        q: `[B x queries, H, D]`, contiguous: absorbed queries, float32 or bfloat16. Queries of a block are neighbours.
        kv: `[N, D]`, contiguous, in the dtype of `q`: keys, of which the first `v_dim` dimensions are the values.
        table: `[B x queries, K]`, int32: rows of `kv`, -1 for none; contiguous in its columns.
        queries: number of queries of a block here, K at most.
        own: number of tokens of a block, `queries` by default: a block may have other queries elsewhere. Then those
            that a query does not see are -1.
        seen: `[B x queries]`, int32: how many of them each query sees; counted without it.
        scale: what products are multiplied by.
        v_dim: dimensions of a value.
        out: `[B x queries, H, v_dim]`, contiguous, in the dtype of `q`; written.
        attend: how the first part is attended to; it may leave out columns that the blocks don't share.
        backend: of the other part: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes
            that on CUDA.

    Returns:
        `out`.

    Raises:
        KernelInputError: if shapes, dtypes or devices don't fit together, or the backend can't run them.
    """
    if q.ndim != 3 or 0 in q.shape[1:]:
        raise KernelInputError(f"q is {list(q.shape)}, expected [B x queries, H, D] with heads and dimensions")
    rows, heads, dim = q.shape
    tokens = queries if own is None else own
    if not 2 <= queries <= tokens or rows % queries or table.shape[0] != rows or table.shape[1] < tokens:
        raise KernelInputError(
            f"q is {list(q.shape)} and table {list(table.shape)}, expected blocks of {queries} queries, K at least"
        )
    if tuple(out.shape) != (rows, heads, v_dim) or kv.ndim != 2 or kv.shape[1] != dim or v_dim > dim:
        raise KernelInputError(
            f"kv is {list(kv.shape)} and out {list(out.shape)}, expected [N, {dim}] and [{rows}, {heads}, v_dim]"
        )
    if not all(item.is_contiguous() for item in (q, kv, out)) or table.stride(1) != 1:
        raise KernelInputError("q, kv, out or the columns of table are not contiguous")
    expect_one_device(q, kv, table, out)
    if not rows or not v_dim:
        return out
    if not len(kv):
        raise KernelInputError("kv has no rows, expected at least those of the queries' own tokens")
    blocks = rows // queries
    common, count = table[::queries], table.shape[1] - tokens  # [B, K], of which count columns are shared
    attend = attend if count else naive.attend  # kernels want keys
    shared, lse = attend(q.view(blocks, queries * heads, dim), kv, common, scale, count, v_dim)
    keys = table[queries - 1 :: queries, -tokens:]  # [B, tokens]: the last query of a block sees most of them
    if tokens == queries:
        seen = None
    elif seen is None:
        seen = (table[:, -tokens:] >= 0).sum(1, dtype=torch.int32)
    if runs_triton(backend, q):
        from indexcache_kernels.grouped_attention.triton import add_own

        add_own(q, kv, keys, shared, lse, scale, out, seen)
    else:
        naive.add_own(q, kv, keys, shared, lse, scale, out, seen)
    return out
