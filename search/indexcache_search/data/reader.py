"""Sections of sources: tokens with masks of those that count, and a record of the rows read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.formats import Record
from indexcache_search.data.shapes import Conversation, Section, Text, shape_of
from indexcache_search.data.sources import rows
from indexcache_search.data.templates import AS_THEY_ARE, RowOptions
from indexcache_search.errors import DataError, LeftOutError, RowError

WHOLE = 5  # sequences that a document may fill uncut, by default


@dataclass
class SourceReading:
    """Counts of the rows read so far from one source for one purpose. A row is a document.

    Attributes:
        rows: number of rows understood, by the columns that were read.
        repeats: number of rows of which all or a part repeats others, or its own beginning, and is left out.
        held_out: number of rows of which all or a part is in the evaluation set, which another source gave.
        aside: number of rows set aside for the evaluation set, which this source gave.
        used: number of rows of which the set holds tokens.
        remarks: what the user should know about the set.
        unread: columns that were ignored.
        bad: skipped rows, each with the reason.
        left_out: number of rows that are no mistake and can't be used, by reason.
        tokens: number of tokens in those rows.
        counted: number of tokens that count.
        conversations: number of rows written by a chat template.
        taken_apart: number of conversations split into one text per reply.
        example: the first row: its last text, or its token ids.
    """

    source: str
    purpose: str
    rows: Counter[str] = field(default_factory=Counter)
    repeats: int = 0
    held_out: int = 0
    aside: int = 0
    used: int = 0
    remarks: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    bad: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    counted: int = 0
    conversations: int = 0
    taken_apart: int = 0
    example: Text | list[int] | None = None

    def __str__(self) -> str:
        skipped = f", bad ones skipped: {len(self.bad)}" if self.bad else ""
        kinds = {
            "repeat earlier text": self.repeats,
            "are in the evaluation set, too": self.held_out,
            "are set aside for evaluation": self.aside,
            "left out": self.left_out.total(),
        }
        left_out = "".join(f", {number} {what}" for what, number in kinds.items() if number)
        return (
            f"rows read: {self.rows.total()}{left_out}{skipped}; tokens: {self.tokens}, of which count: {self.counted}"
        )

    @property
    def notes(self) -> Iterator[str]:
        """Notes for the user, one line each."""
        if self.bad:
            more = f" and {len(self.bad) - 1} more" if len(self.bad) > 1 else ""
            yield f"skipped {self.bad[0]}{more}"
        for reason, number in self.left_out.most_common():
            yield f"{self.source}: {number} {self.purpose} rows are left out: {reason}"
        if self.taken_apart:
            yield (
                f"{self.source}: the chat template writes earlier turns otherwise once others follow: each reply is a"
                " text of its own, with what came before it (--rows turns)"
            )
        yield from (f"{self.source}: {remark}" for remark in self.remarks)
        read = f"of {self.rows.total()} {self.purpose} rows read"
        if self.repeats:
            yield f"{self.source}: {self.repeats} {read} repeat earlier text, all or a part; what repeats counts once"
        if self.held_out:
            yield f"{self.source}: {self.held_out} {read} are in the evaluation set, too, all or a part, and left out"


class TokenReader:
    """Reader that turns rows of sources into tokens.

    Args:
        load_tokenizer: called once, at the first row of text.
        vocab_size: upper bound of token ids, exclusive.
        seq_len: tokens of a sequence; long documents are cut into sections of it.
        replies: if true, only the assistant's tokens of a conversation count, and all others are a prompt.
        options: how to interpret rows.

    Attributes:
        readings: one record per source and purpose.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Any],
        vocab_size: int,
        seq_len: int,
        replies: bool = False,
        options: RowOptions = AS_THEY_ARE,
    ) -> None:
        self.replies = replies
        self.readings: list[SourceReading] = []
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._seq_len = seq_len
        self._options = options
        self._notes: dict[str, None] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, with the requested chat template."""
        tokenizer = self._load_tokenizer()
        if self._options.chat_template is not None:
            tokenizer.chat_template = self._options.chat_template
        return tokenizer

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, one line each."""
        notes = dict(self._notes)
        for reading in self.readings:
            notes |= dict.fromkeys(reading.notes)
        if self.readings and not any(reading.conversations for reading in self.readings):
            unused = ["--rows chat_template"] if self._options.chat_template is not None else []
            unused += ["--rows turns"] if self._options.turns != "auto" else []
            notes |= dict.fromkeys(f"{flag} changed no row: none is a conversation" for flag in unused)
        return tuple(notes)

    def documents(self, source: str, seed: int, purpose: str = "", whole: int = WHOLE) -> Iterator[list[Section]]:
        """Yield the documents of `source`, shuffled by `seed`, each as its sections.

        A document is one section, or sections of a sequence each if it would fill more than `whole` of them.

        Args:
            source: see `sources.rows`.
            seed: seed of the order.
            purpose: use of the documents, for reports.
            whole: sequences that a document may fill uncut.

        Raises:
            DataError: if the source can't be found or read, or has more bad rows than may be skipped.
        """
        reading = SourceReading(source, purpose)
        self.readings.append(reading)
        for place, record in rows(source, seed, lambda note: self._notes.setdefault(note)):
            try:
                document = self._encode(record, reading)
            except LeftOutError as error:
                reading.left_out[str(error)] += 1
                continue
            except RowError as error:
                most = self._options.skip_bad_rows
                if len(reading.bad) >= most:
                    already = f" ({most} bad rows were skipped before it)" if most else ""
                    raise DataError(f"{place}: {error}{already}; --rows skip_bad=N skips up to N such rows") from None
                reading.bad.append(f"{place}: {error}")
                continue
            except DataError as error:
                raise DataError(f"{place}: {error}") from None
            size = self._seq_len if len(document.tokens) > whole * self._seq_len else len(document.tokens)
            cuts = [slice(start, start + size) for start in range(0, len(document.tokens), size or 1)]
            yield [Section(document.tokens[cut], document.mask[cut]) for cut in cuts]

    def _encode(self, record: Record, reading: SourceReading) -> Section:
        if isinstance(record, RowError):
            raise record
        shape = shape_of(record)
        content = shape.read(record)
        if isinstance(content, Section):
            texts, tokens, mask = [], content.tokens, content.mask
            if content.written and not self.replies:
                mask = np.ones_like(mask)
        else:
            texts = self._written(content, reading) if isinstance(content, Conversation) else [content]
            tokens, mask = (np.concatenate(parts) for parts in zip(*map(self._tokenized, texts), strict=True))
        wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if len(wrong):
            raise RowError(f"token id {wrong[0]}, expected 0 to {self._vocab_size - 1}")
        reading.rows[shape.named(record)] += 1
        reading.unread.update(shape.unread(record))
        reading.tokens += len(tokens)
        reading.counted += int(mask.sum())
        if reading.example is None:
            reading.example = texts[-1] if texts else tokens.tolist()
        return Section(tokens.astype(np.int32), mask)

    def _written(self, content: Conversation, reading: SourceReading) -> list[Text]:
        written = content.written(self.tokenizer, self._options.turns, self.replies)
        reading.conversations += written.by_template
        reading.taken_apart += written.apart
        for what in written.left_out:
            self._notes[f"{reading.source}: the chat template leaves out {what}"] = None
        return written.texts

    def _tokenized(self, text: Text) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokenize a text and flag tokens that count; with `replies`, those that overlap a reply."""
        words, whole = text.text, ((0, len(text.text)),)
        try:
            words.encode()
        except UnicodeEncodeError:
            raise RowError(
                "holds a byte that is not UTF-8, or half of a surrogate pair; expected text in UTF-8"
            ) from None
        spans = text.replies if self.replies else whole
        ids: list[int] = []
        flags: list[bool] = []
        if spans != whole and getattr(self.tokenizer, "is_fast", False):
            encoded = self.tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)
            ids, flags = encoded["input_ids"], _overlapping(encoded["offset_mapping"], spans)
        else:
            cuts = [0, *(at for span in spans for at in span), len(words)]
            for number, (start, stop) in enumerate(pairwise(cuts)):
                piece = self.tokenizer.encode(words[start:stop], add_special_tokens=False) if start < stop else []
                ids += piece
                flags += [number % 2 == 1] * len(piece)
        if not text.ended and self.tokenizer.eos_token_id is not None:
            ids, flags = [*ids, self.tokenizer.eos_token_id], [*flags, True]
        return np.asarray(ids, np.int64), np.asarray(flags, np.bool_)


def _overlapping(pieces: list[tuple[int, int]], spans: tuple[tuple[int, int], ...]) -> list[bool]:
    begins, ends = np.asarray(pieces, np.int64).reshape(-1, 2).T
    flags = np.zeros(len(begins), np.bool_)
    for start, stop in spans:
        flags |= (begins < stop) & (ends > start)
    return flags.tolist()
