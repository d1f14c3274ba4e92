"""The exact top-k of rows of scores that are there already."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexcache_kernels.indexer_topk.candidates import finish, take_sample, take_segment

SEGMENT = 4096  # scores between two looks at the candidates
SAMPLE = 2048
CHUNK = 128  # candidates that are looked for at a time
WARPS, REGISTERS = 4, 128  # registers a thread, so that four programs fit on a multiprocessor


@triton.jit
def _select_kernel(
    scores_ptr, score_row_stride, starts_ptr, ends_ptr, marks_ptr, candidates_ptr, counts_ptr, bounds_ptr, result_ptr,
    SEGMENT: tl.constexpr, SAMPLE: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, TOPK: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """One row a program: a bound from a sample, candidates of all segments, the best of them."""
    token, one = tl.program_id(0).to(tl.int64), tl.arange(0, 1)
    scores_ptr += token * score_row_stride
    marks_ptr += token * (SEGMENT // 16)
    values_ptr = candidates_ptr + token * ROOM * 2
    indices_ptr = values_ptr + ROOM
    starts_ptr, ends_ptr, counts_ptr, bounds_ptr = (
        starts_ptr + token, ends_ptr + token, counts_ptr + token, bounds_ptr + token
    )  # fmt: skip
    start, end = tl.load(starts_ptr), tl.load(ends_ptr)
    visible = tl.maximum(end - start, 0)
    tl.store(bounds_ptr + one, float("-inf"))
    tl.debug_barrier()
    if visible > ROOM:
        step = visible // SAMPLE
        take_sample(
            scores_ptr=scores_ptr + start, score_stride=step, bounds_ptr=bounds_ptr, starts_ptr=starts_ptr,
            ends_ptr=ends_ptr, num_queries=1, lowest=start, highest=end, step=step, BLOCK_Q=1, SEGMENT=SAMPLE,
            TOPK=TOPK, ROOM=ROOM,
        )  # fmt: skip
    attempt = 0
    while attempt < 2:
        tl.debug_barrier()
        tl.store(counts_ptr + one, 0)
        tl.debug_barrier()
        for segment in range(start, end, SEGMENT):
            take_segment(
                scores_ptr=scores_ptr + segment, marks_ptr=marks_ptr, values_ptr=values_ptr, indices_ptr=indices_ptr,
                counts_ptr=counts_ptr, bounds_ptr=bounds_ptr, starts_ptr=starts_ptr, ends_ptr=ends_ptr, num_queries=1,
                segment=segment, highest=end, BLOCK_Q=1, SEGMENT=SEGMENT, STEPS=STEPS, CHUNK=CHUNK, TOPK=TOPK,
                ROOM=ROOM,
            )  # fmt: skip
            tl.debug_barrier()
        missing = tl.minimum(visible, TOPK) - tl.load(counts_ptr)
        attempt += tl.where(missing > 0, 1, 2)  # the sample misled: once more, without a bound
        tl.debug_barrier()
        tl.store(bounds_ptr + one, float("-inf"))
    finish(
        values_ptr=values_ptr, indices_ptr=indices_ptr, count=tl.load(counts_ptr), result_ptr=result_ptr + token * TOPK,
        TOPK=TOPK, ROOM=ROOM,
    )  # fmt: skip


def select(scores: Tensor, starts: Tensor, ends: Tensor, result: Tensor) -> None:
    """Write the highest scores' places of each row into `result`, ascending, -1 behind them; of equal ones the first.

    Args:
        scores: `[T, L]`, float32, rows contiguous; what lies outside of a row's range is not read.
        starts: `[T]`, int32.
        ends: `[T]`, int32.
        result: `[T, K]`, int32.
    """
    rows, topk = result.shape
    room = 2 * max(SEGMENT, triton.next_power_of_2(topk))

    def workspace(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=scores.device)

    _select_kernel[(rows,)](
        scores_ptr=scores, score_row_stride=scores.stride(0), starts_ptr=starts, ends_ptr=ends,
        marks_ptr=workspace(rows, SEGMENT // 16), candidates_ptr=workspace(rows, 2, room), counts_ptr=workspace(rows),
        bounds_ptr=workspace(rows, dtype=torch.float32), result_ptr=result, SEGMENT=SEGMENT, SAMPLE=min(SAMPLE, room),
        STEPS=(SEGMENT // 16).bit_length() - 1, CHUNK=min(CHUNK, SEGMENT), TOPK=topk, ROOM=room, num_warps=WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip
