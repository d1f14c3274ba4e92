"""How tables, pages and cards speak of patterns: of indexers, or of dense models that decode over pages."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_indexcache.pattern.selection import Selection


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words for one kind of model.

    Attributes:
        sharing: what a pattern does, in a heading.
        question: what a search answers, with a place for the model's name.
        what: what layers do, what a pattern changes, and what gets faster.
        rest: what a search looks for.
        full: layers that share nothing.
        short: the same, behind a number.
        letters: what the letters mean.
        paper: what the idea is from, and where to read it.
        card: what a model card says of the letters, with a place for the model's name.
    """

    sharing: str
    question: str
    what: str
    rest: str
    full: str
    short: str
    letters: str
    paper: tuple[str, str]
    card: str


INDEXERS = Words(
    sharing="Index sharing",
    question="Which indexers {} needs",
    what="In each layer an indexer selects the tokens to attend to, which takes time. A layer can do without its own"
    " and reuse the selection of a layer before it. Then prompts are read faster, and the wrong layers cost quality.",
    rest="the layers that can do without",
    full="layers that run their indexer",
    short="indexers",
    letters="F runs its indexer, S reuses the selection of the F before it",
    paper=("IndexCache", "https://arxiv.org/abs/2603.12201"),
    card="Which layers of {} choose for themselves what they attend to (F),\n"
    "and which reuse the choice of a layer before them (S)",
)
PAGES = Words(
    sharing="Page sharing",
    question="Which layers of {} need all keys",
    what="In each layer every token that is decoded attends to all tokens before it, which takes time. A layer can"
    " attend to a few pages of the cache instead, which a layer before it selected. Then decoding gets faster, and the"
    " wrong layers cost quality; prompts are read as ever.",
    rest="the layers that a few pages are enough for",
    full="layers that attend to everything",
    short="D layers",
    letters="while decoding, D attends to everything, F to pages that it selects by a digest of the keys, S to those"
    " that the D or F before it selected",
    paper=("DELTA", "https://arxiv.org/abs/2510.09883"),
    card="Which layers of {} attend to everything while decoding (D),\n"
    "and which attend to a few pages of the cache that the nearest layer before them selected (S), or select by a"
    " digest of the keys (F)",
)


def words_of(dense: bool) -> Words:
    """Return the words for dense models, or for those with indexers."""
    return PAGES if dense else INDEXERS


def counted(number: int, noun: str) -> str:
    """Write a number of things; `noun` is of one, and gets an `s` for more."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def serving_flags(selection: Selection | None) -> tuple[str, ...]:
    """Return the flags that SGLang needs beside a pattern: of dense models a backend, and pages that fit the selected.

    Args:
        selection: of the pattern; `None` where indexers select.
    """
    if selection is None:
        return ()
    return ("--attention-backend", "flashinfer", "--page-size", str(min(16, selection.page_tokens)))
