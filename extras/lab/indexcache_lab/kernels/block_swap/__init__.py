"""The blocks of a cache in host memory that a decode step has to bring to the device, and bringing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError, expect
from indexcache_lab.kernels.block_swap import naive

WORD = 8  # bytes that a copy moves at once


@dataclass(frozen=True)
class BlockBuffer:
    """The blocks of each request that are on the device, in one layer.

    Attributes:
        blocks: `[B, N]`, int32: the block in each slot, -1 for none.
        order: `[B, N]`, int32: the slots of a request, the least recently used one first.
    """

    blocks: Tensor
    order: Tensor

    @classmethod
    def empty(cls, requests: int, slots: int, device: torch.device | str = "cpu") -> BlockBuffer:
        """Return a buffer that holds nothing yet."""
        order = torch.arange(slots, dtype=torch.int32, device=device).repeat(requests, 1)
        return cls(torch.full_like(order, -1), order)


def swap_blocks(
    requested: Tensor,
    new_block: Tensor,
    buffer: BlockBuffer,
    *,
    slots: Tensor | None = None,
    needs_copy: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Give every requested block a slot of the buffer; missing ones replace the least recently used.

    The order is that of SGLang's HiSparse (0.5.23): first the blocks that were not requested, then the missing ones in
    the order of `requested`, then those that were there, in the order before. `buffer` is changed in place; shapes are
    static, so that a CUDA graph can capture the call.

    Args:
        requested: `[B, K]`, int32: different blocks, -1 for none. Where each key head chooses for itself, a row is one
            of a request, and B counts them all.
        new_block: `[B]`, int32: the block that the newest token goes to, which is written on the device; -1 for none.
            It gets a slot as others do, but is not copied.
        buffer: `[B, N]`, N at least K.
        slots: `[B, K]`, int32; allocated if not given.
        needs_copy: `[B, K]`, bool; allocated if not given.
        backend: `naive` is PyTorch, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto` takes that on CUDA.

    Returns:
        `slots`, where each requested block is, -1 for none; and `needs_copy`, whether it has to be copied there.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    if requested.ndim != 2 or requested.dtype != torch.int32 or requested.stride(1) != 1:
        raise KernelInputError(
            f"requested is {list(requested.shape)} of {requested.dtype}, expected [B, K] of torch.int32, in rows"
        )
    batch, count = requested.shape
    if buffer.blocks.ndim != 2 or buffer.blocks.shape[1] < count:
        raise KernelInputError(f"buffer is {list(buffer.blocks.shape)}, expected [{batch}, {count} or more slots]")
    for name, tensor in (("buffer.blocks", buffer.blocks), ("buffer.order", buffer.order)):
        expect(name, tensor, (batch, buffer.blocks.shape[1]), torch.int32)
        if not tensor.is_contiguous():
            raise KernelInputError(f"{name} is not contiguous")
    expect("new_block", new_block, (batch,), torch.int32)
    slots = torch.empty_like(requested) if slots is None else slots
    needs_copy = torch.empty_like(requested, dtype=torch.bool) if needs_copy is None else needs_copy
    expect("slots", slots, (batch, count), torch.int32)
    expect("needs_copy", needs_copy, (batch, count), torch.bool)
    swap: Callable[..., None] = naive.swap_blocks
    if runs_triton(backend, requested):
        from indexcache_lab.kernels.block_swap import triton

        swap = triton.swap_blocks
    swap(requested, new_block, blocks=buffer.blocks, order=buffer.order, slots=slots, needs_copy=needs_copy)
    return slots, needs_copy


def copy_blocks(
    source: Tensor, target: Tensor, requested: Tensor, slots: Tensor, needs_copy: Tensor, *, backend: Backend = "auto"
) -> None:
    """Copy the blocks that `swap_blocks` marked into their slots, on the current stream.

    Args:
        source: `[B, U, ...]`: the blocks of each request, what belongs to one in one piece. On CUDA, either of source
            and target may be pinned host memory, which the kernel reads and writes without a copy of its own.
        target: `[B, N, ...]`, likewise, in the same dtype.
        requested: `[B, K]`, int32.
        slots: `[B, K]`, int32.
        needs_copy: `[B, K]`, bool.
        backend: as for `swap_blocks`; `auto` takes the kernel where either is on a CUDA device.

    Raises:
        KernelInputError: if shapes, dtypes or memory don't fit.
    """
    if source.ndim < 3 or source.shape[2:] != target.shape[2:] or source.shape[0] != target.shape[0]:
        raise KernelInputError(
            f"source is {list(source.shape)} and target {list(target.shape)}, expected [B, U, ...] and [B, N, ...] that"
            " differ in the second axis alone"
        )
    pieces = [item[0, 0] for item in (source, target) if item.shape[0] and item.shape[1]]
    if source.dtype != target.dtype or not all(piece.is_contiguous() for piece in pieces):
        raise KernelInputError(
            f"source is {source.dtype} and target {target.dtype}, expected one dtype, and blocks in one piece"
        )
    size = source.shape[2:].numel() * source.element_size()
    if size % WORD:
        raise KernelInputError(f"blocks are {size} bytes, expected a multiple of {WORD}")
    expect("requested", requested, (len(source), requested.shape[-1]), torch.int32)
    expect("slots", slots, tuple(requested.shape), torch.int32)
    expect("needs_copy", needs_copy, tuple(requested.shape), torch.bool)
    if not needs_copy.numel() or not size or len(pieces) < 2:
        return
    if not runs_triton(backend, source if source.is_cuda else target):
        naive.copy_blocks(source, target, requested, slots, needs_copy)
        return
    for name, item in (("source", source), ("target", target)):
        if requested.is_cuda and not item.is_cuda and not item.is_pinned():
            raise KernelInputError(f"{name} is in memory that the device can't reach, expected pinned memory")
    from indexcache_lab.kernels.block_swap import triton

    triton.copy_blocks(source, target, requested, slots, needs_copy)
