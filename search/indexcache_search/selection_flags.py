"""What a dense model's layers select, as flags of command lines say it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from indexcache_search import bounded
from indexcache_search.errors import SearchError
from sglang_indexcache.selection import COMPRESSED_KEYS, DEFAULT, SCORES, Selection
from sglang_indexcache.steps import GRAMMAR, NO_MEMORY, Steps

MOST = 64  # selections of one comparison, each of which is evaluated
NOSAS = Selection(page_tokens=64, pages=64, recent_pages=16, sink_pages=1, score=COMPRESSED_KEYS)
"""The paper's sizes (arXiv 2510.13602): blocks of 64, one sink, a window of 16."""
_DEFAULTS = {DEFAULT.score: DEFAULT, NOSAS.score: NOSAS}


def _both(name: str) -> str:
    return f"{getattr(DEFAULT, name)}, with {NOSAS.score} {getattr(NOSAS, name)}"


PAGES = "Dense models: pages that S and F layers attend to"
STEPS = f"Dense models: what a choice remembers of the steps before: {GRAMMAR}"
PagesEach = Annotated[str, typer.Option(help=f"{PAGES}, in the place of the file's; 16,64,256: each.")]
StepsEach = Annotated[str, typer.Option(help=f"{STEPS}; none,ema:0.9: each.")]
PageTokens = Annotated[
    int | None,
    typer.Option(help=f"Dense models: tokens of a page. Default: {_both('page_tokens')}.", callback=bounded.tokens()),
]
RecentPages = Annotated[
    int | None,
    typer.Option(
        help="Dense models: newest pages, always attended to. Default: one in 8, with compressed_keys one in 4.",
        callback=bounded.tokens(0),
    ),
]
SinkPages = Annotated[
    int | None,
    typer.Option(
        help=f"Dense models: first pages, always attended to. Default: {_both('sink_pages')}.",
        callback=bounded.tokens(0),
    ),
]
Score = Annotated[
    str | None,
    typer.Option(
        help=f"Dense models: what pages are chosen by: {' or '.join(SCORES)} (docs/dense-models.md)."
        " Default: the first."
    ),
]


def selections_of(
    *,
    pages: str = "",
    page_tokens: int | None = None,
    recent_pages: int | None = None,
    sink_pages: int | None = None,
    score: str | None = None,
    steps: str = "",
) -> tuple[Selection, ...]:
    """What the flags say, for each of the numbers in `pages` and the policies in `steps`; nothing without a flag.

    Raises:
        SearchError: if a word is none of those.
        PatternError: if sizes don't go together.
    """
    if not pages and not steps and all(item is None for item in (page_tokens, recent_pages, sink_pages, score)):
        return ()
    if score is not None and score not in SCORES:
        raise SearchError(f"--score is {score[:40]}, expected {' or '.join(SCORES)}")
    default = _DEFAULTS[score or DEFAULT.score]
    numbers = [word.strip() for word in pages.split(",")] if pages else [str(default.pages)]
    if any(not (word.isascii() and word.isdecimal() and len(word) < 9) for word in numbers):
        raise SearchError(f"--pages is {pages[:60]}, expected numbers like 16,64,256")
    policies = [Steps.parse(word.strip()) for word in steps.split(",")] if steps else [NO_MEMORY]
    if len(numbers) * len(policies) > MOST:
        raise SearchError(
            f"--pages and --steps name {len(numbers) * len(policies)} selections, expected at most {MOST}"
        )
    share = default.pages // default.recent_pages
    found = [
        Selection(
            page_tokens=default.page_tokens if page_tokens is None else page_tokens,
            pages=number,
            recent_pages=max(1, number // share) if recent_pages is None else recent_pages,
            sink_pages=default.sink_pages if sink_pages is None else sink_pages,
            score=default.score,
            steps=policy,
        )
        for number, policy in itertools.product(map(int, numbers), policies)
    ]
    return tuple(dict.fromkeys(found))


def only(selections: Sequence[Selection]) -> Selection | None:
    """The one selection that flags say, if they say any.

    Raises:
        SearchError: if there are several.
    """
    if len(selections) > 1:
        raise SearchError("--pages and --steps name several selections, expected one")
    return selections[0] if selections else None


def suffix(selection: Selection | None, among: Iterable[Selection | None]) -> str:
    """What goes behind a line's name: what its selection has in another way than those beside it."""
    others = {item for item in among if item is not None}
    if selection is None:
        return ""
    words = {
        "pages": f"{selection.pages} pages",
        "page_tokens": f"of {selection.page_tokens} tokens",
        "score": selection.score,
        "steps": str(selection.steps),
        "recent_pages": f"{selection.recent_pages} recent",
        "sink_pages": f"{selection.sink_pages} sinks",
        "buffer_pages": f"buffer {selection.buffer_pages}",
    }
    differ = [name for name in words if len({getattr(item, name) for item in others}) > 1]
    if "pages" in differ and "recent_pages" in differ:  # which follows it, where nobody says otherwise
        differ.remove("recent_pages")
    return "".join(f", {words[name]}" for name in differ)
