"""Calibration and held-out evaluation tokens, packed from the documents of sources.

Evaluation takes its documents first, in an order independent of the seed, so that patterns found with different seeds
are compared on the same held-out tokens. A document is in one of the two sets at most: of a source that gives both,
every second document stays for calibration as long as the others have text. Documents are used in turn, see `in_turn`,
and recognised by their content, even if shifted.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.reader import WHOLE, SourceReading, TokenReader
from indexcache_search.data.shapes import Section
from indexcache_search.data.sketch import Seen, Sketch
from indexcache_search.data.tokens import TokenSet
from indexcache_search.data.turns import Document, every_second, in_turn
from indexcache_search.errors import DataError
from sglang_indexcache import ModelLayers

EVALUATION_ORDER_SEED = 0
_exists = os.path.exists  # unlike `Path.exists`, false for what is no valid path
Purpose = Literal["evaluation", "calibration", "training"]
_TOKEN = np.dtype([("token", np.int32), ("counts", np.bool_), ("begins", np.bool_), ("document", np.int32)])


class Wish(int):
    """A number of sequences that nobody asked for: of a source that has fewer, these are taken."""

    @classmethod
    def unless(cls, asked: int | None, default: int) -> int:
        """Return the number that was asked for, else a wish."""
        return cls(default) if asked is None else asked


class Packer:
    """Packer of documents into the sets of a run, which uses each once.

    Args:
        reader: reads the sources.
        model: gives `first_sparse_position`. Only targets predicted from there on are scored, since earlier outputs are
            the same under every pattern.
        seq_len: tokens per sequence.
        calibrated: sketches of text that must not be used.
        apart: tokens see their own document alone, however many a sequence holds. What is left of a document at the end
            of a sequence goes on in the next, as a document of its own.

    Attributes:
        left_out: number of documents that were left out since a sketch knows a part of them.

    Raises:
        DataError: if sequences are not longer than `index_topk`.
    """

    def __init__(
        self,
        reader: TokenReader,
        model: ModelLayers,
        seq_len: int,
        calibrated: Sequence[Sketch] = (),
        apart: bool = False,
    ) -> None:
        if seq_len < model.first_sparse_position + 2:
            raise DataError(
                f"--seq-len is {seq_len}, but queries see every token up to position {model.first_sparse_position}"
                f" (index_topk is {model.index_topk}), where all patterns are equal; expected at least"
                f" {model.first_sparse_position + 2}"
            )
        self.left_out = 0
        self._reader, self._seq_len, self._calibrated, self._apart = reader, seq_len, calibrated, apart
        self._first_scored = model.first_sparse_position + 1  # token t is predicted by a query that sees t tokens
        self._held_out, self._used = Seen(), Seen()  # by the evaluation set, and by any other
        self._evaluation: Sequence[str] = ()
        self._both: Sequence[str] = ()  # those of them that give another set, too
        self._aside: set[bytes] = set()  # digests of whole documents of theirs, even if parts repeat others

    def held_out(self, sources: Sequence[str], count: int, others: Sequence[str] = ()) -> TokenSet:
        """Build the evaluation set, before any other; see `collect`.

        Args:
            sources: see `collect`.
            count: number of sequences.
            others: sources of the sets that follow. Of one that is in both, at most every second document is set aside
                as long as these have text.
        """
        self._evaluation = sources
        self._both = [source for source in sources if _meets(source, others)]
        return self.collect(sources, count, EVALUATION_ORDER_SEED, "evaluation")

    def collect(self, sources: Sequence[str], count: int, seed: int, purpose: Purpose) -> TokenSet:
        """Build a set of documents that no earlier set has.

        Args:
            sources: each has an equal share of the sequences; the first ones also share the remainder.
            count: number of sequences; if it is a `Wish`, sources with less text give what they have.
            seed: order of the documents.
            purpose: use of the set; for training every token counts that its source counts.

        Raises:
            DataError: if the sources hold too little, or can't be read.
        """
        if not sources or count < len(sources):
            raise DataError(f"{count} {purpose} sequences from {len(sources)} sources, expected at least one of each")
        [(source, times)] = Counter(sources).most_common(1)
        if times > 1:
            raise DataError(f"{source}: stands there twice as {purpose} source, expected each source once")
        first_scored = 1 if purpose == "training" else self._first_scored
        share, extra = divmod(count, len(sources))
        packed: list[NDArray[Any]] = []
        source_of: list[int] = []
        for number, source in enumerate(sources):
            own_share = share + (number < extra)
            own = self._pack(self._sections(source, seed, purpose, count), own_share, first_scored)
            reading = self._reader.readings[-1]
            reading.used = len(np.unique(np.stack(own)["document"])) if own else 0
            if len(own) < (1 if isinstance(count, Wish) else own_share):
                raise self._too_little(reading, len(own), own_share)
            if len(own) < own_share:
                reading.remarks.append(
                    f"gives {len(own)} {purpose} sequences, fewer than the default of {own_share}; all are used"
                )
            if len(own) > 1 and reading.used == 1:
                reading.remarks.append(f"all {len(own)} {purpose} sequences come from one document")
            packed += own
            source_of += [number] * len(own)
        rows = np.stack(packed)
        starts, scored = _scored(rows, first_scored)
        prompt = ~rows["counts"] if self._reader.replies else None
        seen = starts if self._apart else None
        return TokenSet(rows["token"].copy(), scored, np.asarray(source_of), tuple(sources), prompt, seen)

    def _too_little(self, reading: SourceReading, found: int, wanted: int) -> DataError:
        source, purpose, aside = reading.source, reading.purpose, reading.aside
        if aside and not reading.used:
            whole = "only document is" if aside == 1 else f"{aside} documents are"
            return DataError(
                f"{source}: its {whole} set aside for evaluation, and none may be in both sets; expected --evaluation"
                f" FILE with other text, or more documents ({reading})"
            )
        apart = f", or longer documents: the first {self._first_scored} tokens of each don't count"
        return DataError(
            f"{source}: gives {found} {purpose} sequences of {self._seq_len} tokens, {wanted} were asked for"
            f" ({reading}); expected more text, a shorter --seq-len or fewer sequences"
            + (", or --evaluation FILE with other text" if aside else apart if self._apart else "")
        )

    def _sections(self, source: str, seed: int, purpose: Purpose, count: int) -> Iterator[tuple[int, Section]]:
        """Yield sections that no set has, each with the number of its document, in the order of their use."""
        used = self._held_out if purpose == "evaluation" else self._used
        if purpose != "evaluation" or source not in self._both:
            yield from in_turn(self._documents(source, seed, purpose, used, used))
            return
        left: list[Document] = []
        documents = self._documents(source, seed, purpose, used, Seen())
        yield from in_turn(self._taken(every_second(documents, left)))
        if not isinstance(count, Wish):
            yield from in_turn(self._taken(left))

    def _documents(self, source: str, seed: int, purpose: Purpose, used: Seen, read: Seen) -> Iterator[Document]:
        """Yield the documents of a source without sections that are in `used`, `read` or the evaluation set.

        `read` remembers all of them.
        """
        also = self._held_out if purpose != "evaluation" else Seen()
        aside, found = _meets(source, self._evaluation), set[bytes]()
        whole = 1 if _meets(source, self._both) else WHOLE  # so that few documents suffice for two sets
        for number, sections in enumerate(self._reader.documents(source, seed, purpose, whole)):
            reading = self._reader.readings[-1]
            digest = hashlib.sha256(b"".join(section.tokens.tobytes() for section in sections)).digest()
            if aside and purpose != "evaluation" and digest in self._aside:
                reading.aside += digest not in found
                reading.repeats += digest in found
                found.add(digest)
                continue
            repeated, held_out, new = False, False, list[Section]()
            for section in sections:
                if section.tokens in read or section.tokens in used:
                    repeated = True
                    continue
                read.add(section.tokens)
                if section.tokens in also:
                    held_out = True
                else:
                    new.append(section)
            reading.repeats += repeated
            reading.held_out += held_out
            if any(sketch.covers(section.tokens) for section in sections for sketch in self._calibrated):
                self.left_out += 1
            elif new:
                yield Document(number, new, digest)

    def _taken(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield documents, and remember that they are set aside."""
        for document in documents:
            self._aside.add(document.digest)
            for section in document.sections:
                self._held_out.add(section.tokens)
            yield document

    def _pack(self, sections: Iterator[tuple[int, Section]], wanted: int, first_scored: int) -> list[NDArray[Any]]:
        """Return sequences with a scored token, `[seq_len]` of `_TOKEN`: sections of this length, or others joined."""
        packed: list[NDArray[Any]] = []
        size, left = self._seq_len, np.empty(0, _TOKEN)
        for number, section in sections:
            rows = np.zeros(len(section.tokens), _TOKEN)
            rows["token"], rows["counts"], rows["document"] = section.tokens, section.mask, number
            rows["begins"][:1] = self._apart
            if len(rows) != size:
                rows = np.concatenate([left, rows])
                left = rows[len(rows) // size * size :]
            for start in range(0, len(rows) - size + 1, size):
                own = rows[start : start + size]
                if _scored(own, first_scored)[1].any():
                    packed.append(own)
                if len(packed) == wanted:
                    return packed
        return packed


def _scored(rows: NDArray[Any], first: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return where the documents of tokens begin, and which tokens are scored: from `first` of their document on."""
    place = np.arange(rows.shape[-1], dtype=np.int32)
    starts = np.maximum.accumulate(np.where(rows["begins"], place, np.int32(0)), axis=-1)
    return starts, rows["counts"] & (place - starts >= first)


def _meets(source: str, others: Sequence[str]) -> bool:
    """Return true if a source is one of `others`, or one of both is a file or folder in the other."""
    if source in others:
        return True
    if not _exists(source):
        return False
    own, *rest = (Path(name).resolve() for name in (source, *others) if _exists(name))
    return any(own.is_relative_to(other) or other.is_relative_to(own) for other in rest)
