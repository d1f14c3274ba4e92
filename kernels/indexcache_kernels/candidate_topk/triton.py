"""Scores of gathered keys, one query a program, then an exact selection of a row's best; see README.md beside this."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.candidate_topk.pages import Pages
from indexcache_kernels.heads import arithmetic
from indexcache_kernels.indexer_topk.candidates import finish, ordered_score

BLOCK_N = {1: 128, 2: 128, 4: 32}  # candidates that are gathered at a time, by bytes of a number
STAGES = 3
ROWS = 4096  # queries whose scores are in memory at a time
PROGRAMS = 4  # a multiprocessor, below which a query's candidates are split


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, weights_ptr, k_scale_ptr, candidates_ptr, values_ptr, table_ptr, requests_ptr, length,
    table_stride, page_stride, scale_stride, PAGE: tl.constexpr,
    NUM: tl.constexpr, ROOM: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores of `length` candidates of a query from `length` x program 1 on, as integers in their order.

    Keys are the rows of the product, so heads add up inside a thread. With a PAGE size they are found by page tables.
    """
    query, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, dim = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_DIM)  # [PADDED_HEADS], [PADDED_DIM]
    head_mask, dim_mask = head < HEADS, dim < DIM
    query_columns = tl.load(
        q_ptr + (query * HEADS + head[None, :]) * DIM + dim[:, None],
        mask=head_mask[None, :] & dim_mask[:, None],
        other=0.0,
    )  # [PADDED_DIM, PADDED_HEADS]
    weight = tl.load(weights_ptr + query * HEADS + head, mask=head_mask, other=0.0)
    if UPCAST:
        query_columns = query_columns.to(tl.float32)
    if PAGE:
        table_row_ptr = table_ptr + tl.load(requests_ptr + query).to(tl.int64) * table_stride
    begin = part * length
    for first in range(begin, tl.minimum(begin + length, NUM), BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        token = tl.load(candidates_ptr + query * NUM + slot, mask=slot < NUM, other=-1)
        token_mask = token >= 0
        key_at, scale_at = token.to(tl.int64) * DIM, token.to(tl.int64)
        if PAGE:
            page = tl.load(table_row_ptr + token // PAGE, mask=token_mask, other=0).to(tl.int64)
            key_at = page * page_stride + token % PAGE * DIM
            scale_at = page * scale_stride + token % PAGE
        key_rows = tl.load(
            k_ptr + key_at[:, None] + dim[None, :],
            mask=token_mask[:, None] & dim_mask[None, :],
            other=0.0,
        )  # [BLOCK_N, PADDED_DIM]
        if UPCAST:
            key_rows = key_rows.to(tl.float32)
        product = tl.dot(key_rows, query_columns, input_precision=PRECISION)  # [BLOCK_N, PADDED_HEADS]
        score = tl.sum(tl.maximum(product, 0.0) * weight[None, :], axis=1)  # [BLOCK_N]
        if SCALED:
            score *= tl.load(k_scale_ptr + scale_at, mask=token_mask, other=0.0)
        tl.store(values_ptr + query * ROOM + slot, ordered_score(score).to(tl.int32, bitcast=True), mask=slot < NUM)


@triton.jit
def _select_kernel(
    values_ptr, candidates_ptr, result_ptr, NUM: tl.constexpr, ROOM: tl.constexpr, TOPK: tl.constexpr
):  # fmt: skip
    """The best TOPK of a query's candidates."""
    query, slot = tl.program_id(0).to(tl.int64), tl.arange(0, ROOM)
    candidates_ptr += query * NUM
    count = tl.sum((tl.load(candidates_ptr + slot, mask=slot < NUM, other=-1) >= 0).to(tl.int32))
    result_ptr += query * TOPK
    finish(
        values_ptr=values_ptr + query * ROOM, indices_ptr=candidates_ptr, count=count, result_ptr=result_ptr,
        TOPK=TOPK, ROOM=ROOM,
    )  # fmt: skip


def candidate_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    candidates: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
    pages: Pages | None = None,
) -> Tensor:
    """See `indexcache_kernels.candidate_topk`."""
    queries, heads, dim = q.shape
    num = candidates.shape[1]
    selected = torch.empty((queries, topk), dtype=torch.int32, device=q.device)
    if not queries:
        return selected
    block = BLOCK_N[k.itemsize]
    room = triton.next_power_of_2(max(num, topk, block))
    rows = min(queries, ROWS)
    most = PROGRAMS * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    splits = max(1, min(triton.cdiv(num, block), most // rows))
    length = triton.cdiv(triton.cdiv(num, splits), block) * block
    values = torch.empty((rows, room), dtype=torch.int32, device=q.device)
    table, requests = (candidates, candidates[:, :1]) if pages is None else (pages.table, pages.requests)
    for first in range(0, queries, ROWS):
        some = slice(first, first + ROWS)
        here, given = len(q[some]), candidates[some]
        _scores_kernel[(here, triton.cdiv(num, length) if num else 1)](
            q[some], k, weights[some], k if k_scale is None else k_scale, given, values, table, requests[some],
            length, table.stride(0), k.stride(0), 0 if k_scale is None else k_scale.stride(0),
            PAGE=0 if pages is None else k.shape[1],
            NUM=num, ROOM=room, HEADS=heads, PADDED_HEADS=max(16, triton.next_power_of_2(heads)), DIM=dim,
            PADDED_DIM=max(32 if k.itemsize == 1 else 16, triton.next_power_of_2(dim)), BLOCK_N=block,
            SCALED=k_scale is not None, **arithmetic(q), num_warps=4, num_stages=STAGES,
        )  # fmt: skip
        _select_kernel[(here,)](values, given, selected[some], NUM=num, ROOM=room, TOPK=topk, num_warps=8)
    return selected
