"""Pages of requests in a paged cache, and how many of them a request attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError, expect, expect_one_device


@dataclass(frozen=True)
class PageBudget:
    """Sizes of what a request attends to of its cache.

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
    """Places of the tokens of a batch of requests in a paged cache, as every kernel that reads one takes them.

    What it holds is checked when it is made, and checks read no tensor: making one inside a CUDA graph is fine.

    Attributes:
        table: `[B, M]`, int32: the cache pages of each request in order, of `table_page` slots each. With `starts` one
            list of them all, `[T]`. Entries lie side by side.
        lengths: `[B]`, int32: tokens in the cache, the newest one included.
        table_page: slots of a page of `table`; token t of a request is slot t % table_page of its entry
            t // table_page.
        starts: `[B]`, int32: where each request begins in a table that is a list, in entries.

    Raises:
        KernelInputError: if shapes or dtypes don't fit together, or tensors are on several devices.
    """

    table: Tensor
    lengths: Tensor
    table_page: int = 1
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and devices."""
        table, starts = self.table, self.starts
        if self.table_page < 1:
            raise KernelInputError(f"table_page is {self.table_page}, expected at least 1")
        shape = "[B, M]" if starts is None else "[T]"
        if table.ndim != shape.count(",") + 1 or table.dtype != torch.int32 or table.stride(-1) != 1:
            raise KernelInputError(
                f"table is {list(table.shape)} of {table.dtype}, expected {shape} of torch.int32, in rows"
            )
        expect("lengths", self.lengths, (self.batch,), torch.int32)
        if starts is not None:
            expect("starts", starts, (self.batch,), torch.int32)
        expect_one_device(table, self.lengths, starts)

    @property
    def batch(self) -> int:
        """Number of requests."""
        return len(self.table if self.starts is None else self.starts)

    def expect_beside(self, *tensors: Tensor | None) -> None:
        """Check that tensors are on the device of the table.

        Raises:
            KernelInputError: with the devices.
        """
        expect_one_device(self.table, *tensors)

    def check_scores(self, budget: PageBudget, name: str, scores: Tensor | None) -> tuple[int, int]:
        """Check scores of pages, and return their shape: requests, and the most pages that one can have.

        Args:
            budget: sizes; `table_page` divides its `page_tokens`.
            name: of `scores` in messages.
            scores: `[B, N]`, float32. A table with rows says N without them, a list does not.

        Raises:
            KernelInputError: if sizes, shapes or dtypes don't fit together.
        """
        page = budget.page_tokens
        if page % self.table_page:
            raise KernelInputError(f"table_page is {self.table_page}, expected a divisor of page_tokens ({page})")
        if self.starts is None:
            most = -(-self.table.shape[1] * self.table_page // page)
        elif scores is None or scores.ndim != 2:
            raise KernelInputError(f"{name} is not [B, N], expected the most pages of a request where table is a list")
        else:
            most = scores.shape[1]
        if scores is not None:
            expect(name, scores, (self.batch, most), torch.float32)
        return self.batch, most

    def room_for_scores(self, budget: PageBudget, out: Tensor | None) -> Tensor:
        """Return `out`, checked by `check_scores`, or new room for scores `[B, N]`, float32, on the table's device."""
        shape = self.check_scores(budget, "out", out)
        return torch.empty(shape, dtype=torch.float32, device=self.table.device) if out is None else out
