"""Documents of an archive: which of its files are prose or code worth training on, as plain text."""

from __future__ import annotations

import gzip
import hashlib
import heapq
import html
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prose", "code"]

SHORTEST, LONGEST = 400, 300_000  # characters of a document; longer ones are cut into several
LARGEST = 20_000_000  # bytes of a file, packed if it is
ENDINGS: dict[Kind, frozenset[str]] = {
    "prose": frozenset(
        "1 2 3 4 5 6 7 8 adoc asciidoc dict dox htm html itely man markdown md org page pod qbk qdoc rd rst scrbl sgml "
        "tex texi texinfo txt xml yo".split()
    ),
    "code": frozenset(
        "awk c cc clj cmake cpp cs cxx el erl ex exs f90 fs go h hh hpp hrl hs hxx java jl js kt lisp lua m ml mli mm "
        "php pl pm py pyx r rb rkt rs s scala scm sh sql swift tcl ts vim".split()
    ),
}
_LEFT_OUT = re.compile(
    r"(^|/)(tests?|testsuite|testing|testdata|unittests|t|po|locales?|i18n|translations?|l10n|node_modules|fonts|asic_reg"
    r"|benchmarks?|charts|tables|unicode|generated|registers|changelogs?|third[-_]party|fixtures|fuzz|oui)(/|$)"
    r"|(^|/)(changelog|copying|licen[sc]e|authors|credits|maintainers|configure|ltmain|aclocal|contributors)[^/]*$"
    r"|[-_.](test|min|generated)\.[a-z]+$|_test\.go$|/test_[^/]*$",
    re.IGNORECASE,
)
_COMMON = frozenset("the of and to is in a for that be as or with by it this are on from".split())
_COMMENT = re.compile(
    r"\A(\s*(#!.*\n)?\s*(/\*.*?\*/|\(\*.*?\*\)|<!--.*?-->|"
    r"(?:[ \t]*(?:#|//|;|--|%|@c\b|dnl\b|\.\\\"|\"|\.\.[ \t])[^\n]*\n)+))",
    re.DOTALL,
)
_LEGAL = re.compile(r"copyright|licen[sc]e|SPDX|all rights reserved", re.IGNORECASE)
_TAG = re.compile(r"<(script|style)\b.*?</\1>|<!--.*?-->|<[!?/a-zA-Z][^<>]{0,2000}>", re.DOTALL | re.IGNORECASE)
_RFC_PAGE = re.compile(r"\n*^[^\n]*\[Page [ivx\d]+\][ \t]*\n(?:\f?\n?RFC \d+[^\n]*\n)?\n*", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """A document: its place, prose or code, and text.

    Attributes:
        path: of its file in the archive; parts of a long one have their first character behind it.
    """

    path: str
    kind: Kind
    text: str


def number_of(*words: str) -> int:
    """Return a 64-bit number that depends on the words alone, the same in every process."""
    return int.from_bytes(hashlib.blake2b("\n".join(words).encode(), digest_size=8).digest())


def kind_of(path: str) -> Kind | None:
    """Return whether a file is read as prose or as code; None if it is left out."""
    if _LEFT_OUT.search(path) or ("/RFC/" in path and not path.endswith(".txt.gz")):
        return None
    name = path.lower().rpartition("/")[2]
    ending = name.removesuffix(".gz").removesuffix(".dz").rpartition(".")[2]
    return next((kind for kind, endings in ENDINGS.items() if ending in endings), None)


def chosen(files: Iterable[tuple[str, int, bytes]], megabytes: dict[Kind, float]) -> list[tuple[str, Kind, bytes]]:
    """Return a random choice of the files that are read, no more of each kind than `megabytes`, by path.

    The choice depends on paths and sizes alone.
    """
    heaps: dict[Kind, list[tuple[int, str, bytes]]] = {"prose": [], "code": []}
    held: dict[Kind, int] = {"prose": 0, "code": 0}
    for path, size, data in files:
        kind = kind_of(path)
        if kind is None or not megabytes[kind] or not SHORTEST // 3 <= size <= LARGEST:
            continue
        if path.endswith((".gz", ".dz")):
            data = _unpacked(data)
        heapq.heappush(heaps[kind], (-number_of("choice", path), path, data))
        held[kind] += len(data)
        while held[kind] > 1e6 * megabytes[kind]:
            held[kind] -= len(heapq.heappop(heaps[kind])[2])
    return sorted((path, kind, data) for kind, heap in heaps.items() for _, path, data in heap)


def _unpacked(data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return b""


def documents(files: Iterable[tuple[str, Kind, bytes]]) -> Iterator[Document]:
    """Yield the documents of files, without what is neither English nor code; long ones in parts."""
    for path, kind, data in files:
        text = _decoded(data)
        if text is None:
            continue
        text = _plain(path, kind, text)
        for start in range(0, len(text), LONGEST):
            part = text[start : start + LONGEST]
            if len(part) >= SHORTEST and is_worth(part, kind):
                yield Document(f"{path}:{start}" if start else path, kind, part)


def _decoded(data: bytes) -> str | None:
    if b"\0" in data[:4096]:
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _plain(path: str, kind: Kind, text: str) -> str:
    """Return the text without markup, page breaks and the notice of its licence."""
    name = path.lower().removesuffix(".gz").removesuffix(".dz")
    ending = name.rpartition(".")[2]
    for _ in range(3):  # notices in several comments
        head = _COMMENT.match(text[:20_000])
        if head is None or not _LEGAL.search(head[0]):
            break
        text = text[head.end() :]
    if ending in ("html", "htm", "page", "sgml", "xml"):
        text = re.sub(r"(?<=\S)[ \t]{2,}", " ", html.unescape(_TAG.sub(" ", text)))
    elif kind == "prose" and ending in ("man", *"12345678"):
        text = _without_roff(text)
    elif "/rfc" in name:
        text = _RFC_PAGE.sub("\n\n", text)
    text = re.sub(r"[ \t\f\u00a0]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _without_roff(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if line.startswith((".", "'")):
            name, _, rest = line[1:].strip().partition(" ")
            if name in ("SH", "SS", "Sh", "Ss"):
                line = f"\n{rest}\n"
            elif name in ("PP", "TP", "IP", "LP", "P", "Pp", "It"):
                line = f"\n{rest}" if name in ("IP", "It") else ""
            elif name in ("B", "I", "BR", "BI", "IR", "RB", "RI", "IB", "SM", "SB") or (name[:1].isupper() and rest):
                line = rest
            else:
                continue
        line = re.sub(r"\\f(\[[A-Z]*\]|\(..|.)|\\[&|^/,)]|\\s[-+]?\d", "", line)
        lines.append(
            re.sub(r"\\\(..|\\\[[^\]]*\]", " ", line).replace("\\-", "-").replace("\\e", "\\").replace('"', "")
        )
    return "\n".join(lines)


def is_worth(text: str, kind: Kind) -> bool:
    """Return whether a text reads as English prose or as code that a person wrote: no tables, no data, no blobs."""
    size = len(text)
    plain = text.encode()
    letters = len(plain.translate(None, delete=_NO_LETTERS))
    digits = len(plain.translate(None, delete=_NO_DIGITS))
    lines = text.count("\n") + 1
    if len(plain) > 1.06 * size or digits > 0.12 * size or letters < (0.6 if kind == "prose" else 0.45) * size:
        return False
    if kind == "code":
        return size < 120 * lines and max(map(len, text.split("\n", 2000)[:2000])) < 1500
    words = text[:60_000].lower().split()
    return sum(word in _COMMON for word in words) > 0.1 * len(words)


_LETTERS = bytes(range(65, 91)) + bytes(range(97, 123))
_NO_LETTERS = bytes(sorted({*range(256)} - {*_LETTERS}))
_NO_DIGITS = bytes(sorted({*range(256)} - {*b"0123456789"}))
