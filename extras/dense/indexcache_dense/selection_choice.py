"""Selections of a dense model's layers, and their variants, as in `--selection`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Annotated

from indexcache_dense.reuse import NO_MEMORY, ReusePolicy
from indexcache_dense.selection import COMPRESSED_KEYS, DEFAULT, JOINT, ROUNDED_KEYS, Heads, Score, Selection
from indexcache_search.cli.bounded import TOKENS, Bounds
from indexcache_search.errors import SearchError

MOST = 64  # selections of one comparison at most; each is evaluated
NOSAS = Selection(page_tokens=64, pages=64, recent_pages=16, sink_pages=1, score=COMPRESSED_KEYS)
"""Sizes of the paper (arXiv 2510.13602): blocks of 64, one sink, a window of 16."""
_ROUNDED = Selection(page_tokens=16, pages=64, recent_pages=16, sink_pages=1, score=ROUNDED_KEYS)
_DEFAULTS = {item.score: item for item in (DEFAULT, NOSAS, _ROUNDED)}
_PAGES = Bounds(0, TOKENS.most, TOKENS.reason)


@dataclass(frozen=True, kw_only=True)
class PagesChoice:
    """Sizes of a selection by pages; `pages` may have several values. Defaults depend on the score.

    Attributes:
        pages: pages that a layer attends to.
        page_tokens: tokens of a page.
        recent_pages: the newest pages, always selected; by default a share of `pages`.
        sink_pages: the first pages, always selected.
        heads: which heads share a selection.
    """

    pages: tuple[Annotated[int, _PAGES], ...] = ()
    page_tokens: Annotated[int, _PAGES] | None = None
    recent_pages: Annotated[int, _PAGES] | None = None
    sink_pages: Annotated[int, _PAGES] | None = None
    heads: Heads = JOINT


@dataclass(frozen=True, kw_only=True)
class SelectionChoice(PagesChoice):
    """Selections of a command line: one for each number of pages and each policy.

    Attributes:
        score: how pages are scored.
        steps: how a selection depends on earlier decode steps.

    Raises:
        SearchError: if there are too many selections.
        PatternError: if the sizes contradict each other.
    """

    score: Score = DEFAULT.score
    steps: tuple[ReusePolicy, ...] = (NO_MEMORY,)

    def __post_init__(self) -> None:
        number = max(1, len(self.pages)) * len(self.steps)
        if number > MOST:
            raise SearchError(f"pages and steps name {number} selections, expected at most {MOST}")
        self.selections()

    def selections(self) -> tuple[Selection, ...]:
        """List the selections, each once."""
        default = _DEFAULTS[self.score]
        share = default.pages // default.recent_pages
        sizes = {name: getattr(self, name) for name in ("page_tokens", "recent_pages", "sink_pages")}
        given = {name: size for name, size in sizes.items() if size is not None}
        found = [
            replace(
                default,
                pages=pages,
                steps=steps,
                heads=self.heads,
                **{"recent_pages": max(1, pages // share), **given},
            )
            for pages, steps in itertools.product(self.pages or (default.pages,), self.steps)
        ]
        return tuple(dict.fromkeys(found))
