"""Calibration and held-out evaluation tokens, packed from sections of sources.

Documents are deduplicated by content, even if shifted; long ones are cut into sections. Evaluation takes its sections
first, in an order independent of the seed. Calibration sees only other sections. So the two sets are disjoint, and
patterns found with different seeds are compared on the same held-out tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from indexcache_search.data.reader import TokenReader
from indexcache_search.data.shapes import Section
from indexcache_search.data.sketch import Sketch
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import DataError
from sglang_indexcache import ModelLayers

EVALUATION_ORDER_SEED = 0


class Packer:
    """Packer of sections into the sets of a run, which uses each section once.

    Args:
        reader: reads the sources.
        model: gives `first_sparse_position`. Only targets predicted from there on are scored, since earlier outputs are
            the same under every pattern.
        seq_len: tokens per sequence.
        calibrated: sketches of text that must not be used.

    Attributes:
        left_out: number of sections skipped for that reason.

    Raises:
        DataError: if sequences are not longer than `index_topk`.
    """

    def __init__(
        self, reader: TokenReader, model: ModelLayers, seq_len: int, calibrated: Sequence[Sketch] = ()
    ) -> None:
        if seq_len < model.first_sparse_position + 2:
            raise DataError(
                f"--seq-len is {seq_len}, but queries see every token up to position {model.first_sparse_position}"
                f" (index_topk is {model.index_topk}), where all patterns are equal; expected at least"
                f" {model.first_sparse_position + 2}"
            )
        self.left_out = 0
        self._reader, self._seq_len, self._calibrated = reader, seq_len, calibrated
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
        packed: list[Section] = []
        source_of: list[int] = []
        for number, source in enumerate(sources):
            own_share = share + (number < extra)
            own = self._pack(self._reader.sections(source, seed, purpose), own_share, first_scored)
            if len(own) < own_share:
                raise DataError(
                    f"{source}: gives {len(own)} {purpose} sequences of {self._seq_len} tokens, {own_share} were asked"
                    f" for ({self._reader.readings[-1]}); expected more text, a shorter --seq-len or fewer sequences"
                )
            packed += own
            source_of += [number] * own_share
        tokens, mask = np.stack([item.tokens for item in packed]), np.stack([item.mask for item in packed])
        scored = mask & (np.arange(self._seq_len) >= first_scored)
        prompt = ~mask if self._reader.replies else None
        return TokenSet(tokens, scored, np.asarray(source_of), tuple(sources), prompt)

    def _pack(self, sections: Iterator[Section], wanted: int, first_scored: int) -> list[Section]:
        """Join unused sections and cut them into sequences, keeping those with a scored token."""
        packed: list[Section] = []
        tokens, mask = np.empty(0, np.int32), np.empty(0, np.bool_)
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
            while len(tokens) >= self._seq_len:
                if mask[first_scored : self._seq_len].any():
                    packed.append(Section(tokens[: self._seq_len], mask[: self._seq_len]))
                tokens, mask = tokens[self._seq_len :], mask[self._seq_len :]
                if len(packed) == wanted:
                    return packed
        return packed
