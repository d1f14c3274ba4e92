"""Memory of a layer: for each request, scores or pages of its earlier decode steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError, expect, expect_one_device


@dataclass(frozen=True)
class StepMemory:
    """Memory of one layer, for a batch of requests: averages of scores, or the pages that it holds.

    Only requests that exceed the budget have one. Write 0 into `steps` to let a request's memory begin anew.

    Attributes:
        requests: `[B]`, int64: the row of each request in the other tensors.
        steps: `[R]`, int32: decode steps since the memory began.
        averages: `[R, P]`, float32, with `beta`: scores averaged over steps; P is at least the pages of any request.
        beta: weight of the average so far, between 0 and 1; a step's own scores weigh 1 - beta.
        held: `[R, P]`, bool, with `every`: pages taken by their scores.
        every: steps after which pages are taken anew; the steps between take those that are held.
    """

    requests: Tensor
    steps: Tensor
    averages: Tensor | None = None
    beta: float = 0.0
    held: Tensor | None = None
    every: int = 0

    @property
    def rows(self) -> Tensor:
        """`averages` or `held`."""
        found = self.held if self.averages is None else self.averages
        assert found is not None
        return found

    def check(self, batch: int, most: int, beside: Tensor) -> None:
        """Check shapes and numbers for `batch` requests of at most `most` pages, and that it is on the device `beside`.

        Raises:
            KernelInputError: if they don't fit together.
        """
        if (self.averages is None) == (self.held is None):
            raise KernelInputError("memory has averages and held, or neither, expected one of them")
        if self.averages is not None and not 0 < self.beta < 1:
            raise KernelInputError(f"beta is {self.beta}, expected a number between 0 and 1")
        if self.held is not None and self.every < 2:
            raise KernelInputError(f"every is {self.every}, expected at least 2")
        expect("requests", self.requests, (batch,), torch.int64)
        expect("steps", self.steps, (len(self.steps),), torch.int32)
        name, dtype = ("averages", torch.float32) if self.held is None else ("held", torch.bool)
        expect(name, self.rows, (len(self.steps), max(most, self.rows.shape[-1])), dtype)
        expect_one_device(self.requests, self.steps, self.rows, beside)

    def due(self, row: int) -> bool:
        """Return whether this step of a request needs scores; for the definitions, since kernels read `steps`."""
        return self.held is None or int(self.steps[self.requests[row]]) % self.every == 0
