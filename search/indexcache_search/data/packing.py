"""Calibration and held-out evaluation tokens, packed from sections of sources.

Documents are deduplicated by content, even if shifted; long ones are cut into sections. Evaluation takes its sections
first, in an order independent of the seed. Calibration sees only other sections. So the two sets are disjoint, and
patterns found with different seeds are compared on the same held-out tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.reader import Section, TokenReader
from indexcache_search.data.sketch import Sketch
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import DataError
from sglang_indexcache import ModelLayers

EVALUATION_ORDER_SEED = 0


def build_token_sets(
    reader: TokenReader,
    model: ModelLayers,
    calibration: Sequence[str],
    evaluation: Sequence[str],
    *,
    seq_len: int,
    num_calibration: int,
    num_evaluation: int,
    seed: int,
) -> tuple[TokenSet, TokenSet]:
    """Build the calibration and the held-out evaluation set.

    Args:
        reader: reads the sources.
        model: gives `first_sparse_position`. Only targets predicted from there on are scored, since earlier outputs are
            the same under every pattern.
        calibration: sources, each with an equal share of the sequences; the first ones also share the remainder.
        evaluation: sources, shared alike; may be the same ones.
        seq_len: tokens per sequence.
        num_calibration: number of calibration sequences.
        num_evaluation: number of evaluation sequences.
        seed: order of the calibration documents.

    Raises:
        DataError: if sequences are not longer than `index_topk`, or the sources hold too little.
    """
    packer = _packer(reader, model, seq_len)
    held_out = packer.collect(evaluation, num_evaluation, EVALUATION_ORDER_SEED, "evaluation")
    return packer.collect(calibration, num_calibration, seed, "calibration"), held_out


def build_training_sets(
    reader: TokenReader,
    model: ModelLayers,
    training: Sequence[str],
    evaluation: Sequence[str],
    *,
    seq_len: int,
    num_training: int,
    num_evaluation: int,
    seed: int,
) -> tuple[TokenSet, TokenSet]:
    """Build a training set, which counts every token that its source counts, and the held-out set.

    Arguments and errors are those of `build_token_sets`.
    """
    packer = _packer(reader, model, seq_len)
    held_out = packer.collect(evaluation, num_evaluation, EVALUATION_ORDER_SEED, "evaluation")
    packer = replace(packer, first_scored=1)
    return packer.collect(training, num_training, seed, "training"), held_out


def held_out_set(
    reader: TokenReader,
    model: ModelLayers,
    sources: Sequence[str],
    *,
    seq_len: int,
    count: int,
    calibrated: Sequence[Sketch] = (),
) -> tuple[TokenSet, int]:
    """Build the held-out set of `build_token_sets`, without text that patterns were calibrated on.

    Args:
        reader: reads the sources.
        model: as for `build_token_sets`.
        sources: evaluation sources.
        seq_len: tokens per sequence.
        count: number of sequences.
        calibrated: sketches of calibration sets.

    Returns:
        The set, and the number of sections left out of it.

    Raises:
        DataError: as for `build_token_sets`.
    """
    packer = replace(_packer(reader, model, seq_len), calibrated=tuple(calibrated))
    collected = packer.collect(sources, count, EVALUATION_ORDER_SEED, "evaluation")
    return collected, packer.left_out


def _packer(reader: TokenReader, model: ModelLayers, seq_len: int) -> _Packer:
    if seq_len < model.first_sparse_position + 2:
        raise DataError(
            f"--seq-len is {seq_len}, but queries see every token up to position {model.first_sparse_position}"
            f" (index_topk is {model.index_topk}), where all patterns are equal; expected at least"
            f" {model.first_sparse_position + 2}"
        )
    return _Packer(reader, seq_len, model.first_sparse_position + 1, set(), Sketch())


@dataclass
class _Packer:
    """Packer of sections into sequences.

    Attributes:
        first_scored: the first token of a sequence that may count; token t is predicted by a query that sees t tokens.
        used: digests of the sections already used.
        seen: sketch of their text, independent of cuts.
        calibrated: sketches of text that must not be used.
        left_out: number of sections skipped for that reason.
    """

    reader: TokenReader
    seq_len: int
    first_scored: int
    used: set[bytes]
    seen: Sketch
    calibrated: tuple[Sketch, ...] = ()
    left_out: int = 0

    def collect(self, sources: Sequence[str], count: int, seed: int, what: str) -> TokenSet:
        if not sources or count < len(sources):
            raise DataError(f"{count} {what} sequences from {len(sources)} sources, expected at least one of each")
        twice = next((source for source, number in Counter(sources).items() if number > 1), None)
        if twice is not None:
            raise DataError(f"{twice}: stands there twice as {what} source, expected each source once")
        share, extra = divmod(count, len(sources))
        tokens, scored, prompt, source_of = [], [], [], []
        for number, source in enumerate(sources):
            own_share = share + (number < extra)
            packed = self._pack(self.reader.sections(source, seed, what), own_share)
            if len(packed) < own_share:
                raise DataError(
                    f"{source}: gives {len(packed)} {what} sequences of {self.seq_len} tokens, {own_share} were asked"
                    f" for ({self.reader.readings[-1]}); expected more text, a shorter --seq-len or fewer sequences"
                )
            tokens += [sequence for sequence, _ in packed]
            scored += [mask & (np.arange(self.seq_len) >= self.first_scored) for _, mask in packed]
            prompt += [~mask for _, mask in packed]
            source_of += [number] * own_share
        prompts = np.stack(prompt) if self.reader.replies else None
        return TokenSet(np.stack(tokens), np.stack(scored), np.asarray(source_of), tuple(sources), prompts)

    def _pack(self, sections: Iterator[Section], wanted: int) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Join unused sections and cut them into sequences with masks, keeping those with a scored token."""
        packed: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
        tokens, mask = np.empty(0, np.int32), np.empty(0, np.bool_)
        for section in sections:
            if section.digest in self.used or self.seen.covers(section.tokens):
                continue
            if any(sketch.covers(section.tokens) for sketch in self.calibrated):
                self.left_out += 1
                continue
            self.used.add(section.digest)
            self.seen.add(section.tokens)
            tokens, mask = np.concatenate([tokens, section.tokens]), np.concatenate([mask, section.mask])
            while len(tokens) >= self.seq_len:
                if mask[self.first_scored : self.seq_len].any():
                    packed.append((tokens[: self.seq_len], mask[: self.seq_len]))
                tokens, mask = tokens[self.seq_len :], mask[self.seq_len :]
                if len(packed) == wanted:
                    return packed
        return packed
