"""The same for Hopper, in Gluon: copies of the next keys are on their way while those of this tile are multiplied.

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
def _copy(k_chunks, k_tail, kv_ptr, wide_key, narrow_key, first_chunk, turn, DIM: gl.constexpr):
    """Start to copy keys to shared memory: `first_chunk` and on of `[chunks, TILE, CHUNK]`, `turn` of the tails."""
    CHUNK: gl.constexpr = k_chunks.shape[2]
    TAIL: gl.constexpr = k_tail.shape[2]
    CHUNKS: gl.constexpr = (DIM - TAIL) // CHUNK
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])  # 16 bytes a thread
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    ptrs = kv_ptr + wide_key.to(gl.int64)[:, None] * DIM + gl.arange(0, CHUNK, gl.SliceLayout(0, wide))[None, :]
    for i in gl.static_range(CHUNKS):
        load_async(k_chunks.index(first_chunk + i), ptrs + i * CHUNK)
    dim = CHUNKS * CHUNK + gl.arange(0, TAIL, gl.SliceLayout(0, narrow))
    load_async(k_tail.index(turn), kv_ptr + narrow_key.to(gl.int64)[:, None] * DIM + dim[None, :])
    async_copy.commit_group()


@gluon.jit
def union_kernel(
    q_ptr, kv_ptr, keys_ptr, owners_ptr, counts_ptr, out_ptr, scale, room, rows,
    HEADS: gl.constexpr, OWN: gl.constexpr, ROWS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr,
    TILE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Attend from the OWN rows of one block, pairs of a query and a head; `scale` is to base 2.

    Two groups of four warps share each product: both have its 64 rows, and half of its columns. The next tile is
    copied while this one is multiplied, all of the time.
    """
    DIM: gl.constexpr = MAIN + TAIL
    CHUNKS: gl.constexpr = MAIN // CHUNK
    gl.static_assert(CHUNKS == 4 and ROWS == 64 and TILE == 64)
    dtype: gl.constexpr = gl.bfloat16
    shared_wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype)
    shared_narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TAIL], dtype)
    of_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, CHUNK // 2, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    block = gl.program_id(0).to(gl.int64)
    keys_ptr += block * room
    owners_ptr += block * room
    count = gl.load(counts_ptr + block)

    q = gl.allocate_shared_memory(dtype, [CHUNKS, ROWS, CHUNK], shared_wide)
    q_tail = gl.allocate_shared_memory(dtype, [ROWS, TAIL], shared_narrow)
    k = gl.allocate_shared_memory(dtype, [2 * CHUNKS, TILE, CHUNK], shared_wide)
    k_tail = gl.allocate_shared_memory(dtype, [2, TILE, TAIL], shared_narrow)
    weights = gl.allocate_shared_memory(dtype, [ROWS, TILE], shared_narrow)

    wide_slot = gl.arange(0, TILE, gl.SliceLayout(1, wide))
    narrow_slot = gl.arange(0, TILE, gl.SliceLayout(1, narrow))
    column = gl.arange(0, TILE, gl.SliceLayout(0, of_pairs))
    end = (count + TILE - 1) // TILE * TILE  # keys up to here are rows of the cache; behind it is no memory, maybe
    wide_key = gl.load(keys_ptr + wide_slot, mask=wide_slot < end, other=0)
    narrow_key = gl.load(keys_ptr + narrow_slot, mask=narrow_slot < end, other=0)
    if count > 0:
        _copy(k, k_tail, kv_ptr, wide_key, narrow_key, 0, 0, DIM)
    wide_key = gl.load(keys_ptr + TILE + wide_slot, mask=TILE + wide_slot < end, other=0)
    narrow_key = gl.load(keys_ptr + TILE + narrow_slot, mask=TILE + narrow_slot < end, other=0)

    row = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    at = block * OWN + row
    mask = ((row < OWN) & (at < rows))[:, None]
    dim = gl.arange(0, CHUNK, gl.SliceLayout(0, wide))[None, :]
    for i in gl.static_range(CHUNKS):
        q.index(i).store(gl.load(q_ptr + at[:, None] * DIM + i * CHUNK + dim, mask=mask, other=0.0))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, narrow))
    at = block * OWN + row
    dim = MAIN + gl.arange(0, TAIL, gl.SliceLayout(0, narrow))[None, :]
    mask = ((row < OWN) & (at < rows))[:, None]
    q_tail.store(gl.load(q_ptr + at[:, None] * DIM + dim, mask=mask, other=0.0))

    query = (gl.arange(0, ROWS, gl.SliceLayout(1, of_pairs)) // HEADS)[:, None]
    highest = gl.full((ROWS,), -1.0e30, gl.float32, gl.SliceLayout(1, of_pairs))
    total = gl.zeros((ROWS, TILE), gl.float32, of_pairs)
    mean0 = gl.zeros((ROWS, CHUNK), gl.float32, of_chunk)
    mean1 = gl.zeros((ROWS, CHUNK), gl.float32, of_chunk)
    mean2 = gl.zeros((ROWS, CHUNK), gl.float32, of_chunk)
    mean3 = gl.zeros((ROWS, CHUNK), gl.float32, of_chunk)
    for first in range(0, count, TILE):
        turn = first // TILE % 2
        owner = gl.load(owners_ptr + first + column).to(gl.int32)[None, :]
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()  # and nobody reads the tile before
        score = gl.zeros((ROWS, TILE), gl.float32, of_pairs)
        for i in gl.static_range(CHUNKS):
            score = warpgroup_mma(q.index(i), k.index(turn * CHUNKS + i).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma(q_tail, k_tail.index(turn).permute((1, 0)), score, is_async=True)
        later = first + TILE
        if later < count:
            _copy(k, k_tail, kv_ptr, wide_key, narrow_key, (1 - turn) * CHUNKS, 1 - turn, DIM)
        wide_key = gl.load(keys_ptr + later + TILE + wide_slot, mask=later + TILE + wide_slot < end, other=0)
        narrow_key = gl.load(keys_ptr + later + TILE + narrow_slot, mask=later + TILE + narrow_slot < end, other=0)
        score = warpgroup_mma_wait(0, deps=[score])
        score = gl.where((owner >> query) & 1 != 0, score * scale, float("-inf"))
        higher = gl.maximum(highest, gl.max(score, 1))
        shrink = gl.exp2(highest - higher)
        weight = gl.exp2(score - higher[:, None])
        weights.store(weight.to(dtype))
        fence_async_shared()
        total = total * shrink[:, None] + weight
        highest = higher
        by_chunk = gl.convert_layout(shrink, gl.SliceLayout(1, of_chunk))[:, None]
        mean0, mean1, mean2, mean3 = mean0 * by_chunk, mean1 * by_chunk, mean2 * by_chunk, mean3 * by_chunk
        barrier()
        mean0 = warpgroup_mma(weights, k.index(turn * CHUNKS), mean0, is_async=True)
        mean1 = warpgroup_mma(weights, k.index(turn * CHUNKS + 1), mean1, is_async=True)
        mean2 = warpgroup_mma(weights, k.index(turn * CHUNKS + 2), mean2, is_async=True)
        mean3 = warpgroup_mma(weights, k.index(turn * CHUNKS + 3), mean3, is_async=True)
        mean0, mean1, mean2, mean3 = warpgroup_mma_wait(0, deps=[mean0, mean1, mean2, mean3])

    whole = gl.sum(total, 1)
    part = gl.convert_layout(1.0 / gl.where(whole == 0.0, 1.0, whole), gl.SliceLayout(1, of_chunk))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, of_chunk))
    at = block * OWN + row
    mask = ((row < OWN) & (at < rows))[:, None]
    ptrs = out_ptr + at[:, None] * MAIN + gl.arange(0, CHUNK, gl.SliceLayout(0, of_chunk))[None, :]
    gl.store(ptrs, (mean0 * part).to(dtype), mask=mask)
    gl.store(ptrs + CHUNK, (mean1 * part).to(dtype), mask=mask)
    gl.store(ptrs + 2 * CHUNK, (mean2 * part).to(dtype), mask=mask)
    gl.store(ptrs + 3 * CHUNK, (mean3 * part).to(dtype), mask=mask)
