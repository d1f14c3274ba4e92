"""Blocks that come to the device and go: kernels and the simulator against definitions and a brute-force buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from indexcache_kernels import KernelInputError
from indexcache_lab.kernels import BlockBuffer, copy_blocks, swap_blocks
from indexcache_lab.offload.lru_buffer import LruBuffer, hisparse_misses
from sglang_indexcache.io.errors import IndexCacheError
from tests.kernels.interpreter import DEVICE, poisoned

__all__ = ["poisoned"]  # a fixture of every test here


class BruteForce:
    """Times of use, and nothing clever: of one time, what was missing went before what was there."""

    def __init__(self, size: int) -> None:
        self.size, self.used, self.now = size, dict[int, tuple[int, int, int]](), 0

    def use(self, requested: list[int]) -> list[int]:
        self.now += 1
        missing = [item for item in requested if item not in self.used]
        there = sorted((item for item in requested if item in self.used), key=lambda item: self.used[item])
        for item in sorted(set(self.used) - set(requested), key=lambda item: self.used[item]):
            if len(self.used) + len(missing) > self.size:
                del self.used[item]
        for kind, items in enumerate((missing, there)):
            for number, item in enumerate(items):
                self.used[item] = (self.now, kind, number)
        return missing


def trace(seed: int) -> tuple[int, list[list[int]]]:
    """A buffer's size, and what steps want: some of it again and again."""
    rng = np.random.default_rng(seed)
    size, blocks = int(rng.integers(1, 24)), int(rng.integers(24, 60))
    popular = rng.permutation(blocks)
    steps = []
    for _ in range(int(rng.integers(1, 30))):
        count = int(rng.integers(0, size + 1))
        shares = np.exp(-rng.random() * 0.3 * np.arange(blocks))
        steps.append(rng.choice(popular, count, replace=False, p=shares / shares.sum()).tolist())
    return size, steps


def test_the_simulator_is_a_buffer_with_times_of_use() -> None:
    for seed in range(300):
        size, steps = trace(seed)
        buffer, brute = LruBuffer(size), BruteForce(size)
        for requested in steps:
            assert buffer.use(np.asarray(requested, np.int32)).tolist() == brute.use(requested)
            assert set(buffer.order.tolist()) - {-1} == set(brute.used)


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_what_the_kernel_loads_is_what_the_simulator_counts(backend: Any) -> None:
    """Three requests side by side, each with a new item; the order of use included."""
    for seed in range(6 if backend == "triton" else 60):
        rng = np.random.default_rng(seed)
        traces = [trace(3 * seed + number) for number in range(3)]
        size, count = max(size for size, _ in traces), max(len(requested) for _, steps in traces for requested in steps)
        if not count:
            continue
        buffer, simulated = BlockBuffer.empty(3, size, DEVICE), [LruBuffer(size) for _ in range(3)]
        for step in range(min(len(steps) for _, steps in traces)):
            rows = [steps[step] for _, steps in traces]
            new_block = [int(rng.choice(row)) if row and rng.random() < 0.5 else -1 for row in rows]
            padded = [rng.permutation([*row, *[-1] * (count - len(row))]).tolist() for row in rows]
            requested = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
            slots, needs_copy = swap_blocks(
                requested, torch.tensor(new_block, dtype=torch.int32, device=DEVICE), buffer, backend=backend
            )
            for row, own in enumerate(simulated):
                expected = own.use(np.asarray(padded[row], np.int32), new_block[row])
                assert requested[row][needs_copy[row]].tolist() == expected.tolist()
                held = buffer.blocks[row][buffer.order[row].long()]
                assert held.tolist() == own.order.tolist()
                assert sorted(buffer.order[row].tolist()) == list(range(size))
                live = requested[row] >= 0
                assert torch.equal(buffer.blocks[row][slots[row][live].long()], requested[row][live])
                assert (slots[row][~live] == -1).all()


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_key_heads_are_rows_of_their_own(backend: Any) -> None:
    """Two requests of three key heads, of which each wants other blocks: six buffers, six simulators."""
    rng, size = np.random.default_rng(5), 9
    buffer, simulated = BlockBuffer.empty(2 * 3, size, DEVICE), [LruBuffer(size) for _ in range(6)]
    misses = np.zeros(6, int)
    for _ in range(12):
        wanted = np.stack([np.sort(rng.choice(14, 6, replace=False)) for _ in range(6)]).astype(np.int32)
        new_block = np.repeat(rng.choice(14, 2), 3).astype(np.int32)  # the token of a request is that of all its heads
        requested = torch.from_numpy(wanted).to(DEVICE)
        slots, needs_copy = swap_blocks(requested, torch.from_numpy(new_block).to(DEVICE), buffer, backend=backend)
        brought = [len(own.use(wanted[row], int(new_block[row]))) for row, own in enumerate(simulated)]
        assert needs_copy.sum(1).tolist() == brought
        assert torch.equal(buffer.blocks.gather(1, slots.long()), requested)
        misses += brought
    assert len(set(misses.tolist())) > 1 and min(misses) > 0


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_are_where_the_swap_says(backend: Any, dtype: torch.dtype) -> None:
    """What is attended to is what is in host memory, whatever came and went before."""
    rng, blocks, size = np.random.default_rng(0), 20, 6
    host = torch.randint(0, 200, (2, blocks, 2, 4, 3, 8)).to(dtype)
    host = host.pin_memory() if DEVICE == "cuda" else host
    memory = torch.zeros(2, size, 2, 4, 3, 8, dtype=dtype, device=DEVICE)
    buffer = BlockBuffer.empty(2, size, DEVICE)
    none = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    for _ in range(10):
        requested = np.stack([rng.choice(blocks, 5, replace=False) for _ in range(2)]).astype(np.int32)
        requested[0, rng.integers(5)] = -1
        given = torch.from_numpy(requested).to(DEVICE)
        slots, needs_copy = swap_blocks(given, none, buffer, backend=backend)
        copy_blocks(host, memory, given, slots, needs_copy, backend=backend)
        for row in range(2):
            for block, slot in zip(requested[row].tolist(), slots[row].tolist(), strict=True):
                assert block < 0 or torch.equal(memory[row, slot].cpu(), host[row, block])


def test_hisparse_loads_the_token_before_the_newest_again() -> None:
    """Its place is the newest token's; until the buffer is full nothing is loaded."""
    steps = [(np.asarray([0, length - 2, length - 1], np.int32), length) for length in range(7, 13)]
    assert hisparse_misses(steps, 8, 6) == [0, 0, 0, 1, 1, 1]  # token 7 has a place in the buffer, 8 had the newest's
    far = [(np.asarray([1, 12 + step], np.int32), 20 + step) for step in range(3)]
    assert hisparse_misses(far, 4, 19) == [1, 1, 1]
    assert hisparse_misses(steps, 12, 6) == hisparse_misses(steps, 10**12, 6) == [0] * 6  # at once: all is held


def test_misuse_is_refused() -> None:
    with pytest.raises(IndexCacheError, match="buffer of 2 items can't hold 3 different ones"):
        LruBuffer(2).use(np.asarray([1, 2, 3], np.int32))
    with pytest.raises(IndexCacheError, match="different ones at once"):
        LruBuffer(4).use(np.asarray([1, 1], np.int32))
    with pytest.raises(IndexCacheError, match="can't hold 2 different ones at first"):
        LruBuffer(4, [1, 1])
    with pytest.raises(IndexCacheError, match="step 0: 9 tokens, expected 8"):
        hisparse_misses([(np.asarray([1], np.int32), 9)], 4, 7)
    new_block, requested = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(KernelInputError, match=r"buffer is .1, 2., expected .1, 3 or more slots"):
        swap_blocks(requested, new_block, BlockBuffer.empty(1, 2))
    with pytest.raises(KernelInputError, match=r"requested is .* expected .B, K. of torch.int32"):
        swap_blocks(requested.long(), new_block, BlockBuffer.empty(1, 4))
    with pytest.raises(KernelInputError, match="new_block is"):
        swap_blocks(requested, new_block.long(), BlockBuffer.empty(1, 4))
    slots, needs_copy = swap_blocks(requested[:, :1], new_block, BlockBuffer.empty(1, 4))
    host = torch.zeros(1, 4, 3)
    with pytest.raises(KernelInputError, match="blocks are 12 bytes, expected a multiple of 8"):
        copy_blocks(host, host.clone(), requested[:, :1], slots, needs_copy)
    with pytest.raises(KernelInputError, match=r"expected .B, U, .... and .B, N, ...."):
        copy_blocks(host, torch.zeros(1, 4, 4), requested[:, :1], slots, needs_copy)
    with pytest.raises(KernelInputError, match="expected one dtype"):
        copy_blocks(host, host.half(), requested[:, :1], slots, needs_copy)
