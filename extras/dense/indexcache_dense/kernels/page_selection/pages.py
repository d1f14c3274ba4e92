"""The pages of requests' caches, and how many of them a request attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError, expect


@dataclass(frozen=True)
class PageBudget:
    """How much of its cache a request attends to.

    Attributes:
        page_tokens: tokens of a page, counted from position 0.
        pages: pages that are selected; a request with no more than these attends to all of them.
        recent_pages: the last ones are always among them; at least one, since the newest token is in there.
        sink_pages: and so are the first ones.
    """

    page_tokens: int = 16
    pages: int = 64
    recent_pages: int = 8
    sink_pages: int = 0

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            KernelInputError: naming what does not fit.
        """
        if self.page_tokens < 1 or self.page_tokens & (self.page_tokens - 1):
            raise KernelInputError(f"page_tokens is {self.page_tokens}, expected a power of two")
        if self.recent_pages < 1:
            raise KernelInputError(f"recent_pages is {self.recent_pages}, expected at least 1")
        if self.sink_pages < 0:
            raise KernelInputError(f"sink_pages is {self.sink_pages}, expected at least 0")
        if self.recent_pages + self.sink_pages >= self.pages:
            raise KernelInputError(
                f"pages is {self.pages}, expected more than recent_pages ({self.recent_pages}) and sink_pages"
                f" ({self.sink_pages}) together"
            )


@dataclass(frozen=True)
class CachedPages:
    """The caches of a batch of requests, in pages.

    Attributes:
        table: `[B, M]`, int32: the cache pages of each request in order; with `starts` one list of them all, `[T]`.
        lengths: `[B]`, int32: tokens in the cache, the newest one included.
        starts: `[B]`, int32: where each request begins in a table that is a list.
        table_page: slots of a page of `table`.
        budget: sizes of what is selected.
    """

    table: Tensor
    lengths: Tensor
    starts: Tensor | None
    table_page: int
    budget: PageBudget

    def check(self, what: str, scores: Tensor | None) -> tuple[int, int]:
        """Return the number of requests and the most pages of one, which a list leaves to `scores`, called `what`.

        Raises:
            KernelInputError: if shapes or dtypes don't fit together.
        """
        table, starts, page = self.table, self.starts, self.budget.page_tokens
        if self.table_page < 1 or page % self.table_page:
            raise KernelInputError(f"table_page is {self.table_page}, expected a divisor of page_tokens ({page})")
        batch = check_table(table, self.lengths, starts)
        if starts is None:
            return batch, -(-table.shape[1] * self.table_page // page)
        expect("starts", starts, (batch,), torch.int32)
        if scores is None or scores.ndim != 2:
            raise KernelInputError(f"{what} is not [B, N], expected the most pages of a request where table is a list")
        return batch, scores.shape[1]


def check_table(table: Tensor, lengths: Tensor, starts: Tensor | None) -> int:
    """Return the number of requests of a page table; see `CachedPages`.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together.
    """
    shape = "[B, M]" if starts is None else "[T]"
    if table.ndim != shape.count(",") + 1 or table.dtype != torch.int32 or table.stride(-1) != 1:
        raise KernelInputError(
            f"table is {list(table.shape)} of {table.dtype}, expected {shape} of torch.int32, in rows"
        )
    batch = len(table if starts is None else starts)
    expect("lengths", lengths, (batch,), torch.int32)
    return batch
