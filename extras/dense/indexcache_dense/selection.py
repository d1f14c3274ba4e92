"""Selections of dense models: a few pages of the cache that a layer attends to instead of everything."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import ConfigDict, Field, TypeAdapter

from indexcache_dense.reuse import NO_MEMORY, ReusePolicy
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.pattern.selection import PatternSelection

if TYPE_CHECKING:
    from sglang_indexcache import Pattern

MOST_PAGE_TOKENS, MOST_PAGES = 1024, 65536
Score = Literal["token_max", "compressed_keys", "rounded_keys"]
SCORES: tuple[Score, ...] = get_args(Score)
TOKEN_MAX: Literal["token_max"] = "token_max"  # noqa: S105 (a rule, no secret)
COMPRESSED_KEYS: Literal["compressed_keys"] = "compressed_keys"
ROUNDED_KEYS: Literal["rounded_keys"] = "rounded_keys"
OWN_SCORES: tuple[Score, ...] = (COMPRESSED_KEYS, ROUNDED_KEYS)
"""Rules that an `F` layer can select by: they don't need its attention to everything."""
Heads = Literal["joint", "key"]
HEADS: tuple[Heads, ...] = get_args(Heads)
JOINT: Literal["joint"] = "joint"
BY_KEY_HEAD: Literal["key"] = "key"
CHUNK, STRIDE = 32, 16  # tokens of a compressed key, and from one to the next


@dataclass(frozen=True, kw_only=True)
class Selection(PatternSelection):
    """The pages that a layer selects, for itself and for the layers that reuse them, and their score.

    Pages are counted from position 0 of a request. A request with no more than `pages` attends to all of its own.

    Attributes:
        page_tokens: tokens of a page, a power of two.
        pages: pages that are selected.
        recent_pages: newest pages, always selected; at least one, which holds the newest token.
        sink_pages: first pages, always selected.
        score: rule that scores a page. `token_max` (DELTA, arXiv 2510.09883): the sum over its tokens of the largest
            share that a head of the selecting layer gives each. `compressed_keys` (InfLLM-V2 and NOSA, arXiv
            2510.13602): the query's shares of means of 32 keys, 16 tokens apart, summed over the heads of a key head;
            of those that touch the page the largest, summed over key heads. `rounded_keys`: the largest share of its
            attention that a head would give the page if every key were rounded to 4 bits, summed over key heads (keys
            of 4 bits as in Twilight, arXiv 2502.02770).
        heads: which heads share a selection. `joint`: all of a layer. `key`: those of a key head, by their own scores
            alone (InfLLM-V2 and NOSA); with one key head the two are the same.
        steps: policy by which a selection depends on the steps before it.
        buffer_pages: pages of a layer and request that stay on the device while the cache is in host memory; the least
            recently used one goes. `None`: all of the cache is on the device.

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
    score: Annotated[Score, Field(description="what pages are chosen by")]
    heads: Annotated[Heads, Field(description="which heads share a choice: all, or those of a key head")] = JOINT
    steps: Annotated[ReusePolicy, Field(description="what a choice remembers")] = NO_MEMORY
    buffer_pages: Annotated[
        int | None, Field(strict=True, ge=2, le=MOST_PAGES, description="pages that stay on the device")
    ] = None

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
        if self.score not in SCORES:
            raise PatternError(f"score is {self.score!r}, expected {' or '.join(SCORES)}")
        if self.heads not in HEADS:
            raise PatternError(f"heads is {self.heads!r}, expected {' or '.join(HEADS)}")
        if self.score == COMPRESSED_KEYS and self.page_tokens % STRIDE:
            raise PatternError(f"page_tokens is {self.page_tokens}, expected a multiple of {STRIDE} for {self.score}")
        self._check_steps()

    def _check_steps(self) -> None:
        if not isinstance(self.steps, ReusePolicy):
            raise PatternError(f"steps is {self.steps!r}, expected a policy")
        open_pages = self.pages - self.recent_pages - self.sink_pages
        for name in ("swaps", "query_pages"):
            value = getattr(self.steps, name)
            if value is not None and value > open_pages:
                raise PatternError(f"steps: {name} is {value}, expected at most {open_pages}, those chosen by score")
        if self.steps.policy == "nosa" and (self.page_tokens < CHUNK or self.recent_pages < 2):
            raise PatternError(
                f"steps: nosa with page_tokens {self.page_tokens} and recent_pages {self.recent_pages}, expected at"
                f" least {CHUNK} and 2: importance is of whole pages"
            )
        if self.buffer_pages is None:
            return
        if type(self.buffer_pages) is not int or not self.pages <= self.buffer_pages <= MOST_PAGES:
            raise PatternError(f"buffer_pages is {self.buffer_pages!r}, expected {self.pages} (pages) to {MOST_PAGES}")

    @property
    def tokens(self) -> int:
        """Largest number of tokens that are attended to."""
        return self.pages * self.page_tokens

    @classmethod
    def default(cls) -> Selection:
        """Return the paper's."""
        return DEFAULT

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, as in a pattern file; defaults are left out."""
        content: dict[str, Any] = TypeAdapter(Selection).dump_python(self, exclude_defaults=True)
        return content

    def in_words(self) -> str:
        """Return the selection for people: `64 pages of 16 tokens (8 recent), by token_max, steps ema:0.9`."""
        sinks = f", {self.sink_pages} sinks" if self.sink_pages else ""
        pages = f"{self.pages} pages of {self.page_tokens} tokens"
        steps = "" if self.steps == NO_MEMORY else f", steps {self.steps}"
        buffer = "" if self.buffer_pages is None else f", {self.buffer_pages} pages on the device"
        heads = "" if self.heads == JOINT else ", for each key head"
        return f"{pages} ({self.recent_pages} recent{sinks}), by {self.score}{heads}{steps}{buffer}"

    def differing(self, among: Set[Selection]) -> str:
        """See `PatternSelection.differing`."""
        words = {
            "pages": f"{self.pages} pages",
            "page_tokens": f"of {self.page_tokens} tokens",
            "score": self.score,
            "heads": f"heads {self.heads}",
            "steps": str(self.steps),
            "recent_pages": f"{self.recent_pages} recent",
            "sink_pages": f"{self.sink_pages} sinks",
            "buffer_pages": f"buffer {self.buffer_pages}",
        }
        differ = [name for name in words if len({getattr(item, name) for item in among}) > 1]
        if "pages" in differ and "recent_pages" in differ:  # its default follows from `pages`
            differ.remove("recent_pages")
        return "".join(f", {words[name]}" for name in differ)

    def serving_flags(self) -> tuple[str, ...]:
        """See `PatternSelection.serving_flags`: a backend that decodes over pages, and pages that fit the selected."""
        return ("--attention-backend", "flashinfer", "--page-size", str(min(16, self.page_tokens)))

    def __str__(self) -> str:
        """Return the selection in one word, as in `Pattern.key`."""
        words: list[object] = [self.page_tokens, self.pages, self.recent_pages, self.sink_pages, self.score]
        if self.steps != NO_MEMORY or self.buffer_pages is not None or self.heads != JOINT:
            words += [self.steps, "" if self.buffer_pages is None else self.buffer_pages]
        if self.heads != JOINT:
            words.append(self.heads)
        return "|".join(map(str, words))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text that `str` gives.

        Raises:
            PatternError: if `text` has another form.
        """
        words = text.split("|")
        if len(words) not in (5, 7, 8) or not all(map(_is_number, [*words[:4], *filter(None, words[6:7])])):
            raise PatternError(f"selection is {text[:60]!r}, expected four numbers, a score, steps, a buffer and heads")
        tokens, pages, recent, sinks = map(int, words[:4])
        selection = cls(
            page_tokens=tokens,
            pages=pages,
            recent_pages=recent,
            sink_pages=sinks,
            score=words[4],  # type: ignore[arg-type]
            steps=ReusePolicy.parse(words[5]) if len(words) > 5 else NO_MEMORY,
            buffer_pages=int(words[6]) if words[6:] and words[6] else None,
            heads=words[7] if len(words) > 7 else JOINT,  # type: ignore[arg-type]
        )
        if str(selection) != text:
            raise PatternError(f"selection is {text[:60]!r}, expected {selection}")
        return selection


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 9


DEFAULT = Selection(page_tokens=16, pages=64, recent_pages=8, sink_pages=0, score=TOKEN_MAX)
"""The paper's."""


def selection_in(pattern: Pattern) -> Selection | None:
    """Return the selection of a pattern of a dense model; `None` where indexers select."""
    assert pattern.selection is None or isinstance(pattern.selection, Selection)
    return pattern.selection
