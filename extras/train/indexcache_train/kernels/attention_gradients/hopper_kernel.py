"""The gradients of absorbed MLA as one kernel for Hopper, in Gluon: Triton with layouts and waits written out.

Imported by `hopper` alone, where Triton has the names that it takes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # renamed in 3.8


@gluon.jit
def _gather(k_chunks, k_tail, k_ptr, indices_ptr, first, k_row_stride, TOPK: gl.constexpr):
    """Start to copy the keys of slots `first` and on to shared memory; an empty slot takes the first key.

    `k_chunks` is `[chunks, BLOCK_K, CHUNK]`, `k_tail` `[BLOCK_K, TAIL]`: what a row of `k` has after the chunks.
    """
    CHUNKS: gl.constexpr = k_chunks.shape[0]
    BLOCK_K: gl.constexpr = k_chunks.shape[1]
    CHUNK: gl.constexpr = k_chunks.shape[2]
    TAIL: gl.constexpr = k_tail.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])  # 16 bytes a thread
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    slot = first + gl.arange(0, BLOCK_K, gl.SliceLayout(1, wide))
    key = gl.maximum(gl.load(indices_ptr + slot, mask=slot < TOPK, other=0), 0).to(gl.int64)
    ptrs = k_ptr + key[:, None] * k_row_stride + gl.arange(0, CHUNK, gl.SliceLayout(0, wide))[None, :]
    for i in gl.static_range(CHUNKS):
        load_async(k_chunks.index(i), ptrs + i * CHUNK)
    slot = first + gl.arange(0, BLOCK_K, gl.SliceLayout(1, narrow))
    key = gl.maximum(gl.load(indices_ptr + slot, mask=slot < TOPK, other=0), 0).to(gl.int64)
    dim = CHUNKS * CHUNK + gl.arange(0, TAIL, gl.SliceLayout(0, narrow))
    load_async(k_tail, k_ptr + key[:, None] * k_row_stride + dim[None, :])
    async_copy.commit_group()


@gluon.jit
def _add(total, sums_ptr, indices_ptr, first, first_dim, DIM: gl.constexpr, TOPK: gl.constexpr):
    """Add `total`, `[BLOCK_K, WIDTH]`, to the rows of float32 sums that slots `first` and on name.

    A thread holds dimensions 2c, 2c + 1, 8 + 2c and 9 + 2c of 16. The sums have these four side by side, so that one
    instruction adds them and no number changes its thread: 16 dimensions are stored as `[4, 2, 2]` instead of
    `[2, 4, 2]`.
    """
    ROWS: gl.constexpr = total.shape[0]
    WIDTH: gl.constexpr = total.shape[1]
    total = gl.reshape(total, (ROWS, WIDTH // 16, 2, 4, 2))
    total = gl.reshape(gl.permute(total, (0, 1, 3, 2, 4)), (ROWS, WIDTH))
    layout: gl.constexpr = gl.DistributedLinearLayout(  # the threads that have them after the product, in this order
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]] if WIDTH == 128 else [[0, 1], [0, 2], [8, 0], [0, 16]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, WIDTH // 2]],
        [],
        [ROWS, WIDTH],
    )
    total = gl.convert_layout(total, layout)
    slot = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    key = gl.load(indices_ptr + slot, mask=slot < TOPK, other=-1).to(gl.int64)
    dim = first_dim + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    gl.atomic_add(sums_ptr + key[:, None] * DIM + dim[None, :], total, mask=(key >= 0)[:, None], sem="relaxed")


@gluon.jit
def backward_kernel(
    q_ptr,
    k_ptr,
    indices_ptr,
    lse_ptr,
    delta_ptr,
    d_out_ptr,
    d_q_ptr,
    sums_ptr,
    scale,
    k_row_stride,
    num_heads,
    TOPK: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Compute the gradients from one query and BLOCK_H heads; add those of keys to `sums`, in the order of `_add`.

    Two groups of four warps share each product: both have its 64 rows, and half of its columns.
    """
    DIM: gl.constexpr = MAIN + TAIL
    CHUNKS: gl.constexpr = MAIN // CHUNK
    gl.static_assert(CHUNKS == 4 and BLOCK_H == 64 and BLOCK_K == 64)
    dtype: gl.constexpr = gl.bfloat16
    shared_wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype)
    shared_narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TAIL], dtype)
    of_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_K // 2, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, CHUNK // 2, 16])
    of_tail: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TAIL // 2, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    token = gl.program_id(0).to(gl.int64)
    first_head = gl.program_id(1) * BLOCK_H
    indices_ptr += token * TOPK

    q = gl.allocate_shared_memory(dtype, [CHUNKS, BLOCK_H, CHUNK], shared_wide)
    grad = gl.allocate_shared_memory(dtype, [CHUNKS, BLOCK_H, CHUNK], shared_wide)
    q_tail = gl.allocate_shared_memory(dtype, [BLOCK_H, TAIL], shared_narrow)
    k = gl.allocate_shared_memory(dtype, [CHUNKS, BLOCK_K, CHUNK], shared_wide)
    k_tail = gl.allocate_shared_memory(dtype, [BLOCK_K, TAIL], shared_narrow)
    weights = gl.allocate_shared_memory(dtype, [BLOCK_H, BLOCK_K], shared_narrow)
    d_scores = gl.allocate_shared_memory(dtype, [BLOCK_H, BLOCK_K], shared_narrow)

    _gather(k, k_tail, k_ptr, indices_ptr, 0, k_row_stride, TOPK)
    head = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, wide))
    row = (token * num_heads + head)[:, None]
    mask = (head < num_heads)[:, None]
    dim = gl.arange(0, CHUNK, gl.SliceLayout(0, wide))[None, :]
    for i in gl.static_range(CHUNKS):
        q.index(i).store(gl.load(q_ptr + row * DIM + i * CHUNK + dim, mask=mask, other=0.0))
        grad.index(i).store(gl.load(d_out_ptr + row * MAIN + i * CHUNK + dim, mask=mask, other=0.0))
    head = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, narrow))
    dim = MAIN + gl.arange(0, TAIL, gl.SliceLayout(0, narrow))[None, :]
    ptrs = q_ptr + (token * num_heads + head)[:, None] * DIM + dim
    q_tail.store(gl.load(ptrs, mask=(head < num_heads)[:, None], other=0.0))

    head = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, of_pairs))
    base = gl.load(lse_ptr + token * num_heads + head, mask=head < num_heads, other=0.0)
    base = gl.where(base == float("-inf"), 0.0, base) * 1.4426950408889634  # to base 2
    delta = gl.load(delta_ptr + token * num_heads + head, mask=head < num_heads, other=0.0)

    dq0 = gl.zeros((BLOCK_H, CHUNK), gl.float32, of_chunk)
    dq1 = gl.zeros((BLOCK_H, CHUNK), gl.float32, of_chunk)
    dq2 = gl.zeros((BLOCK_H, CHUNK), gl.float32, of_chunk)
    dq3 = gl.zeros((BLOCK_H, CHUNK), gl.float32, of_chunk)
    dq_tail = gl.zeros((BLOCK_H, TAIL), gl.float32, of_tail)
    for first in range(0, TOPK, BLOCK_K):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        score = gl.zeros((BLOCK_H, BLOCK_K), gl.float32, of_pairs)
        d_weight = gl.zeros((BLOCK_H, BLOCK_K), gl.float32, of_pairs)
        for i in gl.static_range(CHUNKS):
            score = warpgroup_mma(q.index(i), k.index(i).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma(q_tail, k_tail.permute((1, 0)), score, is_async=True)
        for i in gl.static_range(CHUNKS):
            d_weight = warpgroup_mma(grad.index(i), k.index(i).permute((1, 0)), d_weight, is_async=True)
        score = warpgroup_mma_wait(CHUNKS, deps=[score])
        slot = first + gl.arange(0, BLOCK_K, gl.SliceLayout(0, of_pairs))
        key = gl.load(indices_ptr + slot, mask=slot < TOPK, other=-1)
        weight = gl.exp2(score * (scale * 1.4426950408889634) - base[:, None])
        weight = gl.where((key >= 0)[None, :], weight, 0.0)
        d_weight = warpgroup_mma_wait(0, deps=[d_weight])
        d_score = weight * (d_weight - delta[:, None]) * scale
        weights.store(weight.to(dtype))
        d_scores.store(d_score.to(dtype))
        fence_async_shared()
        barrier()
        dq0 = warpgroup_mma(d_scores, k.index(0), dq0, is_async=True)
        dq1 = warpgroup_mma(d_scores, k.index(1), dq1, is_async=True)
        dq2 = warpgroup_mma(d_scores, k.index(2), dq2, is_async=True)
        dq3 = warpgroup_mma(d_scores, k.index(3), dq3, is_async=True)
        dq_tail = warpgroup_mma(d_scores, k_tail, dq_tail, is_async=True)
        # from here on keys are not read: the next are loaded while gradients of these are multiplied and added
        done = gl.zeros((BLOCK_K, TAIL), gl.float32, of_tail)
        done = warpgroup_mma(d_scores.permute((1, 0)), q_tail, done, is_async=True)
        dq0, dq1, dq2, dq3, dq_tail = warpgroup_mma_wait(1, deps=[dq0, dq1, dq2, dq3, dq_tail])
        barrier()
        if first + BLOCK_K < TOPK:
            _gather(k, k_tail, k_ptr, indices_ptr, first + BLOCK_K, k_row_stride, TOPK)
        part = gl.zeros((BLOCK_K, CHUNK), gl.float32, of_chunk)
        part = warpgroup_mma(d_scores.permute((1, 0)), q.index(0), part, is_async=True)
        part = warpgroup_mma(weights.permute((1, 0)), grad.index(0), part, is_async=True)
        done = warpgroup_mma_wait(2, deps=[done])
        _add(done, sums_ptr, indices_ptr, first, MAIN, DIM, TOPK)
        for i in gl.static_range(1, CHUNKS):  # a chunk is multiplied while the one before is added
            later = gl.zeros((BLOCK_K, CHUNK), gl.float32, of_chunk)
            later = warpgroup_mma(d_scores.permute((1, 0)), q.index(i), later, is_async=True)
            later = warpgroup_mma(weights.permute((1, 0)), grad.index(i), later, is_async=True)
            part = warpgroup_mma_wait(2, deps=[part])
            _add(part, sums_ptr, indices_ptr, first, (i - 1) * CHUNK, DIM, TOPK)
            part = later
        part = warpgroup_mma_wait(0, deps=[part])
        _add(part, sums_ptr, indices_ptr, first, MAIN - CHUNK, DIM, TOPK)

    head = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, of_chunk))
    dim = gl.arange(0, CHUNK, gl.SliceLayout(0, of_chunk))[None, :]
    ptrs = d_q_ptr + (token * num_heads + head)[:, None] * DIM + dim
    mask = (head < num_heads)[:, None]
    gl.store(ptrs, dq0.to(dtype), mask=mask)
    gl.store(ptrs + CHUNK, dq1.to(dtype), mask=mask)
    gl.store(ptrs + 2 * CHUNK, dq2.to(dtype), mask=mask)
    gl.store(ptrs + 3 * CHUNK, dq3.to(dtype), mask=mask)
    head = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, of_tail))
    dim = MAIN + gl.arange(0, TAIL, gl.SliceLayout(0, of_tail))[None, :]
    ptrs = d_q_ptr + (token * num_heads + head)[:, None] * DIM + dim
    gl.store(ptrs, dq_tail.to(dtype), mask=(head < num_heads)[:, None])
