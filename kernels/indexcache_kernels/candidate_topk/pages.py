"""Where the keys of a request are, in a cache of pages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pages:
    """Page tables, as serving engines have them: position p of a request is number p % S of its page p // S.

    Attributes:
        table: `[R, pages]`, int32, the pages of each request.
        requests: `[T]`, int32, the request of each query.
    """

    table: Tensor
    requests: Tensor
