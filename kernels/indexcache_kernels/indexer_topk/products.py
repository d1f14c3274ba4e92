"""Index scores of a few queries and a segment of keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def products(
    q_ptr, weights_ptr, k_ptr, k_scale_ptr, scores_ptr, num_queries, first_key, step, stop,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENT: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Score every `step`-th of SEGMENT keys for the BLOCK_Q queries from `q` on, into `scores`, `[BLOCK_Q, SEGMENT]`.

    Keys are the rows of the product, so heads add up inside a thread. Queries are loaded here, each time: functions
    that are not inlined must find no shared memory in use; Triton 3.6 let them overwrite it (README.md).
    """
    row, dim = tl.arange(0, BLOCK_Q), tl.arange(0, PADDED_DIM)
    column = tl.arange(0, BLOCK_Q * PADDED_HEADS)  # [BLOCK_Q * PADDED_HEADS]
    head = column % PADDED_HEADS
    column_mask = (column // PADDED_HEADS < num_queries) & (head < HEADS)
    column_offset = column // PADDED_HEADS * HEADS + head
    query_columns = tl.load(
        q_ptr + column_offset[None, :] * DIM + dim[:, None], mask=column_mask[None, :] & (dim < DIM)[:, None], other=0.0
    )
    weight = tl.load(weights_ptr + column_offset, mask=column_mask, other=0.0)
    if UPCAST:
        query_columns = query_columns.to(tl.float32)
    for first in range(0, tl.minimum(SEGMENT, tl.cdiv(stop - first_key, step)), BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        key = first_key + slot * step
        key_mask = key < stop
        key_rows = tl.load(
            k_ptr + key.to(tl.int64)[:, None] * DIM + dim[None, :],
            mask=key_mask[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        if UPCAST:
            key_rows = key_rows.to(tl.float32)
        product = tl.dot(key_rows, query_columns, input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q * PADDED_HEADS]
        product = tl.maximum(product, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(product, (BLOCK_K, BLOCK_Q, PADDED_HEADS)), axis=2)  # [BLOCK_K, BLOCK_Q]
        if SCALED:
            score *= tl.load(k_scale_ptr + key, mask=key_mask, other=0.0)[:, None]
        tl.store(scores_ptr + row[None, :] * SEGMENT + slot[:, None], score)
    tl.debug_barrier()
