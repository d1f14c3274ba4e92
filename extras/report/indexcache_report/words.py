"""Words of pages and cards for patterns: of indexers, or in the words of an extension."""

from __future__ import annotations

from dataclasses import dataclass

from indexcache_search.errors import SearchError
from sglang_indexcache.io.extensions import extensions


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


def words_of(dense: bool) -> Words:
    """Return the words for patterns with indexers, or for those of dense models.

    Raises:
        SearchError: if no extension has words for the latter.
    """
    if not dense:
        return INDEXERS
    found: Words | None = extensions("words", Words).get("dense")
    if found is None:
        raise SearchError("patterns of dense models need an extension that is not installed")
    return found
