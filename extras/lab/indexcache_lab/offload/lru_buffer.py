"""Misses of a buffer on the device, counted without a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.io.errors import IndexCacheError

Items = NDArray[np.int32]


class LruBuffer:
    """The items (blocks, or tokens) of one request and layer that are on the device.

    A missing item replaces the least recently used one. The order of use begins with items that a step did not use. The
    missing items follow, in the order of the request, and then those that were already there. SGLang's HiSparse
    (0.5.23, `hisparse.cuh`) and `indexcache_kernels.swap_blocks` do the same, so that these counts are exactly theirs.

    Args:
        size: items that the buffer holds.
        held: items that it holds at first, the least recently used one first.

    Raises:
        IndexCacheError: if it holds more items than its size, or one twice.
    """

    def __init__(self, size: int, held: Sequence[int] = ()) -> None:
        if size < 1 or len(held) > size or len(set(held)) < len(held):
            raise IndexCacheError(f"a buffer of {size} items can't hold {len(held)} different ones at first")
        self._order = np.full(size, -1, np.int32)
        self._order[size - len(held) :] = held

    @property
    def order(self) -> Items:
        """Items in the buffer, `[size]`, the least recently used one first; -1 for none."""
        order: Items = self._order.copy()
        return order

    def use(self, requested: Items, new_item: int = -1) -> Items:
        """Return the items of `requested` that must be copied to the device; from then on all of them are there.

        Args:
            requested: different items, `[K]`; below 0 for none.
            new_item: an item that is written on the device: it needs a slot, but no copy.

        Raises:
            IndexCacheError: if they don't all fit into the buffer, or one is listed twice.
        """
        requested = requested[requested >= 0]
        if len(requested) > len(self._order) or len(np.unique(requested)) < len(requested):
            raise IndexCacheError(
                f"a buffer of {len(self._order)} items can't hold {len(requested)} different ones at once"
            )
        there = np.isin(self._order, requested)
        missing = requested[~np.isin(requested, self._order[there])]
        self._order = np.concatenate([self._order[~there][len(missing) :], missing, self._order[there]])
        copied: Items = missing[missing != new_item]
        return copied


def page_misses(steps: NDArray[np.int32], size: int, newest: Sequence[int]) -> int:
    """Count the pages that decode steps bring to the device, for one request and layer.

    The buffer begins with the last pages of the prompt and the pages that the first step selects; these are not
    counted. A new page is written on the device, so it is not brought.

    Args:
        steps: pages that each step selects, `[steps, pages]`; below 0 for none.
        size: pages that the buffer holds.
        newest: the page of each step's token.

    Raises:
        IndexCacheError: if a step selects more pages than the buffer holds.
    """
    before, misses = newest[0], 0
    size = min(size, newest[-1] + 1)  # there are no more pages
    buffer = LruBuffer(size, range(max(0, before + 1 - size), before + 1))
    for step, (chosen, page) in enumerate(zip(steps, newest, strict=True)):
        brought = buffer.use(chosen, page if page != before else -1)
        misses, before = misses + (len(brought) if step else 0), page
    return misses


def hisparse_misses(steps: Iterable[tuple[Items, int]], size: int, prompt_tokens: int) -> list[int]:
    """Count the tokens that SGLang's HiSparse (0.5.23) brings to the device, by decode step, of one request and layer.

    Up to `size` tokens, all are on the device. From then on it holds the first `size` of them until others are
    selected. The newest token has a slot of its own, which the next one takes: if it is selected again, it is brought
    back.

    Args:
        steps: tokens that each step selects, and the number of tokens in the cache, the newest one included.
        size: `device_buffer_size`.
        prompt_tokens: tokens in the cache before the first step.

    Raises:
        IndexCacheError: if a step selects more than the buffer holds, or the lengths don't rise by one.
    """
    buffer: LruBuffer | None = None  # `None` as long as it holds everything
    expected, misses = prompt_tokens + 1, list[int]()
    for selected, length in steps:
        if length != expected:
            raise IndexCacheError(f"step {len(misses)}: {length} tokens, expected {expected}")
        expected += 1
        if length <= size:
            misses.append(0)
            continue
        buffer = buffer or LruBuffer(size, range(size))
        misses.append(len(buffer.use(selected[selected != length - 1])))
    return misses
