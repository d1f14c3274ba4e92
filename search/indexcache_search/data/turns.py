"""The order in which documents are used: in turn, so that a few long ones don't fill a set."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from indexcache_search.data.shapes import Section

HELD_TOKENS = 1 << 26  # of documents begun; with more, these go on before another one is begun


@dataclass(frozen=True)
class Document:
    """A document of a source: its number among those read, its sections that may be used, and a digest of all."""

    number: int
    sections: list[Section]
    digest: bytes = b""


def in_turn(documents: Iterable[Document]) -> Iterator[tuple[int, Section]]:
    """Yield the first section of each document, then the second of each that has one, and so on, with its number.

    The next document is asked for once the section before was used, so whoever stops has begun no more than needed.
    """
    begun: deque[tuple[int, deque[Section]]] = deque()
    held, more = 0, iter(documents)
    while True:
        new = next(more, None) if held <= HELD_TOKENS else None
        if new is not None:
            number, left = new.number, deque(new.sections)
            held += sum(len(section.tokens) for section in left)
        elif begun:
            number, left = begun.popleft()
        else:
            return
        if left:
            section = left.popleft()
            held -= len(section.tokens)
            yield number, section
        if left:
            begun.append((number, left))


def every_second(documents: Iterable[Document], others: list[Document]) -> Iterator[Document]:
    """Yield the first document, the third and so on, and put those between them into `others`."""
    for place, document in enumerate(documents):
        if place % 2:
            others.append(document)
        else:
            yield document
