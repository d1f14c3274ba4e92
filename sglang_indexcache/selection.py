"""What layers of a dense model attend to when they don't attend to everything: a few pages of the cache."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field

from sglang_indexcache.errors import PatternError

MOST_PAGE_TOKENS, MOST_PAGES = 1024, 65536
TOKEN_MAX: Literal["token_max"] = "token_max"  # noqa: S105 (a rule, no secret)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How many pages a layer chooses for those that share its choice, and by what (DELTA, arXiv 2510.09883).

    Pages are counted from position 0 of a request. One with no more than `pages` attends to all of its own.

    Attributes:
        page_tokens: tokens of a page, a power of two.
        pages: pages that are chosen.
        recent_pages: the newest are always among them; at least one, which holds the newest token.
        sink_pages: and so are the first.
        score: what a page is chosen by. `token_max`: the sum over its tokens of the largest share that a head of the
            choosing layer gives each.

    Raises:
        PatternError: if the sizes don't go together.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    page_tokens: Annotated[
        int, Field(strict=True, ge=1, le=MOST_PAGE_TOKENS, description="tokens of a page, a power of two")
    ]
    pages: Annotated[int, Field(strict=True, ge=2, le=MOST_PAGES, description="pages that an S layer attends to")]
    recent_pages: Annotated[int, Field(strict=True, ge=1, description="the newest pages, always among them")]
    sink_pages: Annotated[int, Field(strict=True, ge=0, description="the first pages, likewise")]
    score: Annotated[Literal["token_max"], Field(description="what pages are chosen by")]

    def __post_init__(self) -> None:
        for name, least, most in (
            ("page_tokens", 1, MOST_PAGE_TOKENS),
            ("pages", 2, MOST_PAGES),
            ("recent_pages", 1, MOST_PAGES),
            ("sink_pages", 0, MOST_PAGES),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise PatternError(f"{name} is {value!r}, expected {least} to {most}")
        if self.page_tokens & (self.page_tokens - 1):
            raise PatternError(f"page_tokens is {self.page_tokens}, expected a power of two")
        if self.recent_pages + self.sink_pages >= self.pages:
            raise PatternError(
                f"pages is {self.pages}, expected more than recent_pages ({self.recent_pages}) and sink_pages"
                f" ({self.sink_pages}) together"
            )
        if self.score != TOKEN_MAX:
            raise PatternError(f"score is {self.score!r}, expected {TOKEN_MAX}")

    @property
    def tokens(self) -> int:
        """Tokens that are attended to at most."""
        return self.pages * self.page_tokens

    def __str__(self) -> str:
        """All of it in one word, as in `Pattern.key`."""
        return "|".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read back what `str` gives.

        Raises:
            PatternError: if it is something else.
        """
        words = text.split("|")
        if len(words) != 5 or not all(word.isascii() and word.isdecimal() and len(word) < 9 for word in words[:4]):
            raise PatternError(f"selection is {text[:60]!r}, expected four numbers and a score")
        tokens, pages, recent, sinks = map(int, words[:4])
        selection = cls(
            page_tokens=tokens,
            pages=pages,
            recent_pages=recent,
            sink_pages=sinks,
            score=words[4],  # type: ignore[arg-type]
        )
        if str(selection) != text:
            raise PatternError(f"selection is {text[:60]!r}, expected {selection}")
        return selection


DEFAULT = Selection(page_tokens=16, pages=64, recent_pages=8, sink_pages=0, score=TOKEN_MAX)
"""The paper's."""
