"""Sections of sources: tokens with masks of those that count, and a record of the rows read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data import shapes
from indexcache_search.data.chats import Chat, Text
from indexcache_search.data.formats import Damaged, Record
from indexcache_search.data.options import AS_THEY_ARE, RowOptions
from indexcache_search.data.sources import rows
from indexcache_search.data.templates import ChatTemplate, Rendered
from indexcache_search.errors import DataError, RowError

SECTION_SEQUENCES = 4  # longer documents are cut
_EXAMPLE = 160  # characters of either end of an example


@dataclass(frozen=True)
class Section:
    """Piece of one document: `tokens` int32, and `mask` bool of those that count, equally long."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]

    @cached_property
    def digest(self) -> bytes:
        """Sha256 of the tokens."""
        return hashlib.sha256(self.tokens.tobytes()).digest()


@dataclass
class Reading:
    """Counts of the rows read so far from one source for one purpose.

    Attributes:
        rows: number of rows understood, by shape.
        unread: columns that were ignored.
        bad: skipped rows, each with the reason.
        tokens: number of tokens in those rows.
        counted: number of tokens that count.
        conversations: number of rows written by a chat template.
        taken_apart: number of conversations split into one text per reply.
        example: the first row as text, with `[[` and `]]` around the words a model wrote.
        example_ids: the first token ids, if the first row has no text.
    """

    source: str
    purpose: str
    rows: Counter[str] = field(default_factory=Counter)
    unread: set[str] = field(default_factory=set)
    bad: list[str] = field(default_factory=list)
    tokens: int = 0
    counted: int = 0
    conversations: int = 0
    taken_apart: int = 0
    example: str = ""
    example_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        skipped = f", bad ones skipped: {len(self.bad)}" if self.bad else ""
        return f"rows read: {self.rows.total()}{skipped}; tokens: {self.tokens}, of which count: {self.counted}"


class TokenReader:
    """Reader that turns rows of sources into tokens.

    Args:
        load_tokenizer: called once, at the first row of text.
        vocab_size: upper bound of token ids, exclusive.
        seq_len: sections are cut into multiples of it.
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
        self.readings: list[Reading] = []
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

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self._options.turns, self.replies)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, one line each."""
        notes = dict(self._notes)
        for reading in self.readings:
            if reading.bad:
                more = f" and {len(reading.bad) - 1} more" if len(reading.bad) > 1 else ""
                notes[f"skipped {reading.bad[0]}{more}"] = None
            if reading.taken_apart:
                notes[
                    f"{reading.source}: the chat template writes earlier turns otherwise once others follow: each reply"
                    " is a text of its own, with what came before it (--rows turns)"
                ] = None
        if self.readings and not any(reading.conversations for reading in self.readings):
            unused = ["--rows chat_template"] if self._options.chat_template is not None else []
            unused += ["--rows turns"] if self._options.turns != "auto" else []
            notes |= dict.fromkeys(f"{flag} changed no row: none is a conversation" for flag in unused)
        return tuple(notes)

    def sections(self, source: str, seed: int, purpose: str = "") -> Iterator[Section]:
        """Yield the sections of `source`, its documents shuffled by `seed`.

        Args:
            source: see `sources.rows`.
            seed: seed of the order.
            purpose: use of the sections, for reports.

        Raises:
            DataError: if the source can't be found or read, or has more bad rows than may be skipped.
        """
        size = SECTION_SEQUENCES * self._seq_len
        reading = Reading(source, purpose)
        self.readings.append(reading)
        for place, record in rows(source, seed, lambda note: self._notes.setdefault(note)):
            try:
                tokens, mask = self._encode(record, reading)
            except RowError as error:
                self._skip(f"{place}: {error}", reading)
                continue
            except DataError as error:
                raise DataError(f"{place}: {error}") from None
            for start in range(0, len(tokens), size):
                block = slice(start, start + size)
                yield Section(tokens[block], mask[block])

    def _skip(self, line: str, reading: Reading) -> None:
        most = self._options.skip_bad_rows
        if len(reading.bad) >= most:
            already = f" ({most} bad rows were skipped before it)" if most else ""
            raise DataError(f"{line}{already}; --rows skip_bad=N skips up to N such rows")
        reading.bad.append(line)

    def _encode(self, record: Record, reading: Reading) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        if isinstance(record, Damaged):
            raise RowError(record.reason)
        shape = shapes.shape_of(record)
        content = shapes.read(shape, record)
        if isinstance(content, shapes.Tokens):
            tokens, mask = self._checked(content.ids, content.mask)
            texts: list[Rendered] = []
        else:
            texts, ends = self._texts(content, reading)
            parts = [self._tokenized(text, ends) for text in texts]
            tokens = np.concatenate([part for part, _ in parts])
            mask = np.concatenate([part for _, part in parts])
        reading.rows[shape.name] += 1
        reading.unread.update(shapes.unread(shape, record))
        reading.tokens += len(tokens)
        reading.counted += int(mask.sum())
        if not reading.example and not reading.example_ids:
            reading.example = _example(texts[-1], self.replies) if texts else ""
            reading.example_ids = () if texts else tuple(tokens[:_EXAMPLE].tolist())
        return tokens, mask

    def _texts(self, content: Text | Chat, reading: Reading) -> tuple[list[Rendered], bool]:
        """Return the texts of a row to tokenize, and true if an end token is to follow, as templates do it."""
        if isinstance(content, Chat) and not getattr(self.tokenizer, "chat_template", None):
            if content.plain is None:
                raise DataError(
                    "a conversation, and the tokenizer has no chat template; expected --rows chat_template=FILE with"
                    " one in Jinja, or rows of text or input_ids (docs/reference/data.md)"
                )
            content = content.plain
        if isinstance(content, Chat):
            written, apart = self._template.write(content)
            reading.conversations += 1
            reading.taken_apart += apart
            source = str(self.tokenizer.chat_template)
            for word, there in (("tools", bool(content.tools)), ("reasoning", _thinks(content))):
                if there and word not in source and not (word == "reasoning" and "thinking" in source):
                    self._notes[f"{reading.source}: the chat template leaves out {word}"] = None
            return written, False
        text, spans = "", []
        for part, written_by_model in content.parts:
            if written_by_model:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return [Rendered(text, tuple(spans))], True

    def _tokenized(self, rendered: Rendered, ends: bool) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokenize a text and flag tokens that count; with `replies`, those that overlap a reply."""
        text = rendered.text
        if not _is_text(text):
            raise RowError("holds a byte that is not UTF-8, or half of a surrogate pair; expected text in UTF-8")
        whole = not self.replies or rendered.replies == ((0, len(text)),)
        if whole or not getattr(self.tokenizer, "is_fast", False):
            ids, flags = self._in_pieces(text, () if whole else rendered.replies, whole)
        else:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, flags = encoded["input_ids"], _overlapping(encoded["offset_mapping"], rendered.replies)
        end = self.tokenizer.eos_token_id
        if ends and end is not None:
            ids, flags = [*ids, end], [*flags, True]
        return self._checked(ids, flags)

    def _in_pieces(self, text: str, spans: tuple[tuple[int, int], ...], whole: bool) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        flags: list[bool] = []
        cuts = [0, *(at for span in spans for at in span), len(text)]
        for number, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                found = self.tokenizer.encode(text[start:stop], add_special_tokens=False)
                ids += found
                flags += [whole or number % 2 == 1] * len(found)
        return ids, flags

    def _checked(self, ids: Any, mask: Any) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        tokens = _integers(ids, "input_ids")
        flags = np.ones(len(tokens), np.bool_) if mask is None else _integers(mask, "loss_mask") != 0
        if flags.shape != tokens.shape:
            raise RowError(f"loss_mask has {flags.size} entries, input_ids {tokens.size}; expected as many")
        for wrong in (tokens[tokens < 0][:1], tokens[tokens >= self._vocab_size][:1]):
            if len(wrong):
                raise RowError(f"token id {int(wrong[0])}, expected 0 to {self._vocab_size - 1}")
        return tokens.astype(np.int32), flags


def _thinks(chat: Chat) -> bool:
    return any(message.get("reasoning_content") for message in chat.messages)


def _overlapping(pieces: list[tuple[int, int]], spans: tuple[tuple[int, int], ...]) -> list[bool]:
    """Flag the ascending `pieces` that overlap any of the ascending `spans`."""
    if not spans:
        return [False] * len(pieces)
    begins, ends = np.asarray(pieces, np.int64).reshape(-1, 2).T
    starts, stops = np.asarray(spans, np.int64).T
    following = np.searchsorted(stops, begins, side="right")  # the first span that ends after a piece begins
    flags: list[bool] = (starts[np.minimum(following, len(spans) - 1)] < ends).tolist()
    return [flag and int(at) < len(spans) for flag, at in zip(flags, following, strict=True)]


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _example(rendered: Rendered, replies: bool) -> str:
    """Shorten a text to both ends; with `replies`, mark a model's words with `[[` and `]]`."""
    pieces, at = [], 0
    for start, stop in rendered.replies if replies else ():
        pieces += [rendered.text[at:start], "[[", rendered.text[start:stop], "]]"]
        at = stop
    text = "".join([*pieces, rendered.text[at:]])
    return text if len(text) <= 2 * _EXAMPLE else f"{text[:_EXAMPLE]} ... {text[-_EXAMPLE:]}"


def _integers(values: Any, column: str) -> NDArray[Any]:
    """Convert a list of integers to an array; refuse values of other types.

    Raises:
        RowError: if it is not a list of integers.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray("none")
    kinds = "iub" if column == "loss_mask" else "iu"
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise RowError(f"{column} is not a list of integers")
    return array
