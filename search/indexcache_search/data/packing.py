"""Calibration and held-out evaluation tokens, packed from sections of sources.

Documents are deduplicated by content, even if shifted; long ones are cut into sections. Evaluation takes its sections
first, in an order independent of the seed. Calibration sees only other sections. So the two sets are disjoint, and
patterns found with different seeds are compared on the same held-out tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.reader import TokenReader
from indexcache_search.data.shapes import Section
from indexcache_search.data.sketch import Sketch
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import DataError
from sglang_indexcache import ModelLayers

EVALUATION_ORDER_SEED = 0


@dataclass(frozen=True)
class _Sequence:
    """A sequence: rows of a `TokenSet`, and `mask`, bool of the tokens that count in their source."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    scored: NDArray[np.bool_]
    starts: NDArray[np.int32]


class Packer:
    """Packer of sections into the sets of a run, which uses each section once.

    Args:
        reader: reads the sources.
        model: gives `first_sparse_position`. Only targets predicted from there on are scored, since earlier outputs are
            the same under every pattern.
        seq_len: tokens per sequence.
        calibrated: sketches of text that must not be used.
        apart: tokens see their own document alone, however many a sequence holds. What is left of a document at the end
            of a sequence goes on in the next, as a document of its own.

    Attributes:
        left_out: number of sections skipped for that reason.

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
        self._used: set[bytes] = set()  # digests of sections
        self._seen = Sketch()  # of their text, however it is cut

    def held_out(self, sources: Sequence[str], count: int) -> TokenSet:
        """Build the evaluation set, before any other; see `collect`."""
        return self.collect(sources, count, EVALUATION_ORDER_SEED, "evaluation")

    def collect(
        self, sources: Sequence[str], count: int, seed: int, purpose: Literal["evaluation", "calibration", "training"]
    ) -> TokenSet:
        """Build a set of sections that no earlier set has.

        Args:
            sources: each has an equal share of the sequences; the first ones also share the remainder.
            count: number of sequences.
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
        packed: list[_Sequence] = []
        source_of: list[int] = []
        for number, source in enumerate(sources):
            own_share = share + (number < extra)
            own = self._pack(self._reader.sections(source, seed, purpose), own_share, first_scored)
            if len(own) < own_share:
                apart = f", or longer documents: the first {first_scored} tokens of each don't count"
                raise DataError(
                    f"{source}: gives {len(own)} {purpose} sequences of {self._seq_len} tokens, {own_share} were asked"
                    f" for ({self._reader.readings[-1]}); expected more text, a shorter --seq-len or fewer sequences"
                    + (apart if self._apart else "")
                )
            packed += own
            source_of += [number] * own_share
        tokens, mask, scored, starts = (
            np.stack([getattr(item, field.name) for item in packed]) for field in fields(_Sequence)
        )
        prompt = ~mask if self._reader.replies else None
        seen = starts if self._apart else None
        return TokenSet(tokens, scored, np.asarray(source_of), tuple(sources), prompt, seen)

    def _pack(self, sections: Iterator[Section], wanted: int, first_scored: int) -> list[_Sequence]:
        """Join unused sections and cut them into sequences, keeping those with a scored token."""
        packed: list[_Sequence] = []
        tokens, mask, begins = np.empty(0, np.int32), np.empty(0, np.bool_), np.empty(0, np.bool_)
        for section in sections:
            digest = hashlib.sha256(section.tokens.tobytes()).digest()
            if digest in self._used or self._seen.covers(section.tokens):
                continue
            if any(sketch.covers(section.tokens) for sketch in self._calibrated):
                self.left_out += 1
                continue
            self._used.add(digest)
            self._seen.add(section.tokens)
            tokens, mask = np.concatenate([tokens, section.tokens]), np.concatenate([mask, section.mask])
            begins = np.concatenate([begins, self._apart & (np.arange(len(section.tokens)) == 0)])
            while len(tokens) >= self._seq_len:
                own, rest = slice(self._seq_len), slice(self._seq_len, None)
                place = np.arange(self._seq_len, dtype=np.int32)
                starts = np.maximum.accumulate(np.where(begins[own], place, np.int32(0)))
                scored = mask[own] & (place - starts >= first_scored)
                if scored.any():
                    packed.append(_Sequence(tokens[own], mask[own], scored, starts))
                tokens, mask, begins = tokens[rest], mask[rest], begins[rest]
                if len(packed) == wanted:
                    return packed
        return packed
