"""Calibration and held-out evaluation tokens, from text or token ids.

A source is a JSONL, JSON, Parquet or text file, a folder of them, a hub id (`owner/name`, `owner/name:subset`), or
`demo:NAME` for a set that ships with the demo model. Rows hold `text`, `messages` (through the tokenizer's chat
template) or `input_ids` with an optional `loss_mask` (1: the token counts). Everything is streamed.

Documents are deduplicated, also where they begin elsewhere; long ones are cut into sections. Evaluation takes its
sections first, in an order that does not depend on the seed, and calibration only ever sees others: the two sets are
disjoint by construction, and patterns found with different seeds are compared on the same held-out tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.sketch import Sketch
from indexcache_search.data.sources import rows
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import DataError
from sglang_indexcache import SparseModel

SECTION_SEQUENCES = 4  # a document longer than so many sequences is cut
EVALUATION_ORDER_SEED = 0
_COLUMNS = ("input_ids", "text", "messages")


@dataclass(frozen=True)
class Section:
    """A piece of one document: `tokens` int32 and `mask` bool of those that count, equally long."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.tokens.tobytes()).digest()


class TokenReader:
    """Turns the rows of a source into tokens.

    Args:
        load_tokenizer: called once, when the first row of text comes.
        vocab_size: token ids must lie below it.
        seq_len: sections are cut to multiples of it.
        replies: whether it matters who wrote a token: of `messages` only the assistant's count then, and what does not
            count is a prompt.
    """

    def __init__(self, load_tokenizer: Callable[[], Any], vocab_size: int, seq_len: int, replies: bool = False) -> None:
        self.replies = replies
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._seq_len = seq_len

    @cached_property
    def _tokenizer(self) -> Any:
        return self._load_tokenizer()

    def sections(self, source: str, seed: int) -> Iterator[Section]:
        """Yield the sections of `source`, its documents shuffled by `seed`.

        Raises:
            DataError: if the source can't be found or read, or a row has no known column.
        """
        size = SECTION_SEQUENCES * self._seq_len
        for row in rows(source, seed):
            tokens, mask = self._encode(row, source)
            for start in range(0, len(tokens), size):
                block = slice(start, start + size)
                yield Section(tokens[block], mask[block])

    def _encode(self, row: Mapping[str, Any], source: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        column = next((name for name in _COLUMNS if row.get(name) is not None), None)
        if column is None:
            raise DataError(f"{source}: a row has columns {', '.join(row)}, expected one of {', '.join(_COLUMNS)}")
        value = row[column]
        if column == "input_ids":
            ids, mask = value, row.get("loss_mask")
        elif column == "messages":
            ids = self._templated(value, source)
            mask = self._reply_mask(value, ids, source) if self.replies else None
        elif isinstance(value, str):
            end = self._tokenizer.eos_token_id
            ids = self._tokenizer.encode(value, add_special_tokens=False) + ([] if end is None else [end])
            mask = None
        else:
            raise DataError(f"{source}: text is {type(value).__name__}, expected a string")
        tokens = _integers(ids, source, column)
        flags = np.ones(len(tokens), np.bool_) if mask is None else _integers(mask, source, "loss_mask") != 0
        if flags.shape != tokens.shape:
            raise DataError(f"{source}: loss_mask has {flags.size} entries, input_ids {tokens.size}; expected as many")
        for wrong in (tokens[tokens < 0][:1], tokens[tokens >= self._vocab_size][:1]):
            if len(wrong):
                raise DataError(f"{source}: token id {int(wrong[0])}, expected 0 to {self._vocab_size - 1}")
        return tokens.astype(np.int32), flags

    def _templated(self, messages: Any, source: str, asks: bool = False) -> list[int]:
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=False, add_generation_prompt=asks
                )
            )
        except Exception as error:  # templates raise what they like
            raise DataError(f"{source}: the chat template refuses a row: {error}") from None

    def _reply_mask(self, messages: Any, ids: list[int], source: str) -> list[bool]:
        """Which of `ids` the assistant wrote: what stands behind the template's generation prompt.

        Raises:
            DataError: if the template writes the beginning of a conversation otherwise when more of it follows.
        """
        mask = [False] * len(ids)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant" or number == 0:
                continue
            before = self._templated(messages[:number], source, asks=True)
            after = self._templated(messages[: number + 1], source)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise DataError(
                    f"{source}: the chat template rewrites earlier messages, so replies can't be told from prompts;"
                    " expected input_ids with a loss_mask"
                )
            mask[len(before) : len(after)] = [True] * (len(after) - len(before))
        return mask


def _integers(values: Any, source: str, column: str) -> NDArray[Any]:
    """A list of integers as an array; what would have to be converted is refused.

    Raises:
        DataError: if it is something else.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray("none")
    kinds = "iub" if column == "loss_mask" else "iu"
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise DataError(f"{source}: {column} is not a list of integers")
    return array


def build_token_sets(
    reader: TokenReader,
    model: SparseModel,
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
        model: gives `first_choice`: only targets predicted from there on are scored, since before every pattern gives
            the same output.
        calibration: sources; each gets an equal share of the sequences, the first ones what does not divide.
        evaluation: likewise; may name the same sources.
        seq_len: tokens a sequence.
        num_calibration: sequences.
        num_evaluation: sequences.
        seed: order of the calibration documents.

    Raises:
        DataError: if sequences are not longer than `index_topk`, or the sources hold too little.
    """
    packer = _packer(reader, model, seq_len)
    held_out = packer.collect(evaluation, num_evaluation, EVALUATION_ORDER_SEED, "evaluation")
    return packer.collect(calibration, num_calibration, seed, "calibration"), held_out


def build_training_sets(
    reader: TokenReader,
    model: SparseModel,
    training: Sequence[str],
    evaluation: Sequence[str],
    *,
    seq_len: int,
    num_training: int,
    num_evaluation: int,
    seed: int,
) -> tuple[TokenSet, TokenSet]:
    """Build a training set, every token of which counts that its source lets count, and the held-out set.

    Args: as those of `build_token_sets`.

    Raises:
        DataError: as there.
    """
    packer = _packer(reader, model, seq_len)
    held_out = packer.collect(evaluation, num_evaluation, EVALUATION_ORDER_SEED, "evaluation")
    packer = replace(packer, first_scored=1)
    return packer.collect(training, num_training, seed, "training"), held_out


def held_out_set(
    reader: TokenReader,
    model: SparseModel,
    sources: Sequence[str],
    *,
    seq_len: int,
    count: int,
    calibrated: Sequence[Sketch] = (),
) -> tuple[TokenSet, int]:
    """The held-out set that `build_token_sets` makes of the same sources, without what patterns were calibrated on.

    Args:
        calibrated: sketches of calibration sets.

    Returns:
        The set, and how many sections were left out of it.

    Raises:
        DataError: as there.
    """
    packer = replace(_packer(reader, model, seq_len), calibrated=tuple(calibrated))
    collected = packer.collect(sources, count, EVALUATION_ORDER_SEED, "evaluation")
    return collected, packer.left_out


def _packer(reader: TokenReader, model: SparseModel, seq_len: int) -> _Packer:
    if seq_len < model.first_choice + 2:
        raise DataError(
            f"--seq-len is {seq_len}, but queries see every token up to position {model.first_choice} (index_topk is"
            f" {model.index_topk}), where all patterns are equal; expected at least {model.first_choice + 2}"
        )
    return _Packer(reader, seq_len, model.first_choice + 1, set(), Sketch())


@dataclass
class _Packer:
    """Packs sections into sequences.

    Attributes:
        first_scored: the first token of a sequence that may count; token t is predicted by a query that sees t tokens.
        used: digests of the sections that were drawn from.
        seen: their text, wherever it is cut.
        calibrated: text that must not be drawn from.
        left_out: how many sections were not, for that.
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
        share, extra = divmod(count, len(sources))
        tokens, scored, prompt, source_of = [], [], [], []
        for number, source in enumerate(sources):
            own_share = share + (number < extra)
            packed = self._pack(self.reader.sections(source, seed), own_share)
            if len(packed) < own_share:
                raise DataError(
                    f"{source}: gives {len(packed)} {what} sequences of {self.seq_len} tokens, {own_share} were asked"
                    " for; expected more text, a shorter --seq-len or fewer sequences"
                )
            tokens += [sequence for sequence, _ in packed]
            scored += [mask & (np.arange(self.seq_len) >= self.first_scored) for _, mask in packed]
            prompt += [~mask for _, mask in packed]
            source_of += [number] * own_share
        prompts = np.stack(prompt) if self.reader.replies else None
        return TokenSet(np.stack(tokens), np.stack(scored), np.asarray(source_of), tuple(sources), prompts)

    def _pack(self, sections: Iterator[Section], wanted: int) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Join sections that are not used yet, cut them into sequences with masks, keep those with a scored token."""
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
