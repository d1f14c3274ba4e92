"""Calibration and held-out evaluation tokens, from text or token ids.

A source is a JSONL, JSON, Parquet or text file, a folder of them, a hub id (`owner/name`, `owner/name:subset`), or
`demo:NAME` for a set that ships with the demo model. Rows hold `text`, `messages` (through the tokenizer's chat
template) or `input_ids` with an optional `loss_mask` (1: the token counts). Everything is streamed.

Documents are deduplicated; long ones are cut into sections. Evaluation takes its sections first, in an order that does
not depend on the seed, and calibration only ever sees others: the two sets are disjoint by construction, and patterns
found with different seeds are compared on the same held-out tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search import demo
from indexcache_search.errors import DataError
from indexcache_search.tokens import TokenSet
from sglang_indexcache import DsaModel

SHUFFLE_BUFFER = 10_000  # documents held while streaming
SECTION_SEQUENCES = 4  # a document longer than so many sequences is cut
EVALUATION_ORDER_SEED = 0
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text", ".rst": "text"}
_COLUMNS = ("input_ids", "text", "messages")


@dataclass(frozen=True)
class Section:
    """A piece of one document: `tokens` int32 and `mask` bool, equally long."""

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
    """

    def __init__(self, load_tokenizer: Callable[[], Any], vocab_size: int, seq_len: int) -> None:
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
        for row in _rows(source, seed):
            tokens, mask = self._encode(row, source)
            for start in range(0, len(tokens), size):
                part = slice(start, start + size)
                yield Section(tokens[part], mask[part])

    def _encode(self, row: Mapping[str, Any], source: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        column = next((name for name in _COLUMNS if row.get(name) is not None), None)
        if column is None:
            raise DataError(f"{source}: a row has columns {', '.join(row)}, expected one of {', '.join(_COLUMNS)}")
        value = row[column]
        if column == "input_ids":
            ids, mask = value, row.get("loss_mask")
        elif column == "messages":
            try:
                ids = list(self._tokenizer.apply_chat_template(value, tokenize=True, return_dict=False))
            except Exception as error:  # templates raise what they like
                raise DataError(f"{source}: the chat template refuses a row: {error}") from None
            mask = None
        elif isinstance(value, str):
            end = self._tokenizer.eos_token_id
            ids = self._tokenizer.encode(value, add_special_tokens=False) + ([] if end is None else [end])
            mask = None
        else:
            raise DataError(f"{source}: text is {type(value).__name__}, expected a string")
        try:
            tokens = np.asarray(ids, np.int64)
            flags = np.ones(len(tokens), np.bool_) if mask is None else np.asarray(mask, np.int64).astype(np.bool_)
        except (TypeError, ValueError):
            raise DataError(f"{source}: {column} or loss_mask is not a list of integers") from None
        if tokens.ndim != 1 or flags.shape != tokens.shape:
            raise DataError(f"{source}: loss_mask has {flags.size} entries, input_ids {tokens.size}; expected as many")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise DataError(f"{source}: token id {int(tokens.max())}, expected 0 to {self._vocab_size - 1}")
        return tokens.astype(np.int32), flags


def _rows(source: str, seed: int) -> Iterator[Mapping[str, Any]]:
    from datasets import load_dataset  # takes seconds to import

    arguments, options = _location(source)
    try:
        rows = load_dataset(*arguments, **options, split="train", streaming=True)
        yield from rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    except Exception as error:  # datasets, pyarrow and the hub client each have their own
        line = " ".join(str(error).split())[:200]
        raise DataError(f"{source}: can't be read: {line or type(error).__name__}") from None


def _location(source: str) -> tuple[list[str], dict[str, Any]]:
    """Arguments of `datasets.load_dataset` for a source."""
    if source.startswith("demo:"):
        return ["json"], {"data_files": str(demo.data_file(source.removeprefix("demo:")))}
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _BUILDERS and file.is_file())
        if not files:
            raise DataError(f"{source}: no {', '.join(_BUILDERS)} file in this folder")
        endings = {file.suffix for file in files}
        if len({_BUILDERS[ending] for ending in endings}) > 1:
            raise DataError(f"{source}: holds {', '.join(sorted(endings))} files, expected one kind")
        return _file_arguments(files)
    if path.is_file():
        if path.suffix not in _BUILDERS:
            raise DataError(f"{source}: ending is {path.suffix or 'missing'}, expected {', '.join(_BUILDERS)}")
        return _file_arguments([path])
    if path.suffix in _BUILDERS or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise DataError(f"{source}: no such file, and not a hub id like owner/name")
    name, _, subset = source.partition(":")
    return [name, *([subset] if subset else [])], {}


def _file_arguments(files: Sequence[Path]) -> tuple[list[str], dict[str, Any]]:
    builder = _BUILDERS[files[0].suffix]
    options: dict[str, Any] = {"data_files": [str(file) for file in files]}
    if builder == "text":
        options["sample_by"] = "document"
    return [builder], options


def build_token_sets(
    reader: TokenReader,
    model: DsaModel,
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
        reader: of the sources.
        model: gives `index_topk`: only targets predicted from a position that sees more tokens are scored, since up
            to there every pattern gives the same output.
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
    model: DsaModel,
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


def held_out_set(reader: TokenReader, model: DsaModel, sources: Sequence[str], *, seq_len: int, count: int) -> TokenSet:
    """The held-out set that `build_token_sets` makes of the same sources, whatever the calibration set.

    Raises:
        DataError: as there.
    """
    return _packer(reader, model, seq_len).collect(sources, count, EVALUATION_ORDER_SEED, "evaluation")


def _packer(reader: TokenReader, model: DsaModel, seq_len: int) -> _Packer:
    if seq_len < model.index_topk + 2:
        raise DataError(
            f"--seq-len is {seq_len}, but queries see every token up to index_topk={model.index_topk}, where all"
            f" patterns are equal; expected at least {model.index_topk + 2}"
        )
    return _Packer(reader, seq_len, model.index_topk + 1, set())


@dataclass(frozen=True)
class _Packer:
    """Packs sections into sequences.

    Attributes:
        first_scored: the first token of a sequence that may count; token t is predicted by a query that sees t tokens.
        used: digests of the sections that were drawn from.
    """

    reader: TokenReader
    seq_len: int
    first_scored: int
    used: set[bytes]

    def collect(self, sources: Sequence[str], count: int, seed: int, what: str) -> TokenSet:
        if not sources or count < len(sources):
            raise DataError(f"{count} {what} sequences from {len(sources)} sources, expected at least one of each")
        share, extra = divmod(count, len(sources))
        tokens, scored, source_of = [], [], []
        for number, source in enumerate(sources):
            wanted = share + (number < extra)
            packed = self._pack(self.reader.sections(source, seed), wanted)
            if len(packed) < wanted:
                raise DataError(
                    f"{source}: gives {len(packed)} {what} sequences of {self.seq_len} tokens, {wanted} were asked"
                    " for; expected more text, a shorter --seq-len or fewer sequences"
                )
            tokens += [sequence for sequence, _ in packed]
            scored += [flags for _, flags in packed]
            source_of += [number] * wanted
        return TokenSet(np.stack(tokens), np.stack(scored), np.asarray(source_of), tuple(sources))

    def _pack(self, sections: Iterator[Section], wanted: int) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Join sections that are not used yet and cut them into sequences with at least one scored token."""
        packed: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
        tokens, mask = np.empty(0, np.int32), np.empty(0, np.bool_)
        may_count = np.arange(self.seq_len) >= self.first_scored
        for section in sections:
            if section.digest in self.used:
                continue
            self.used.add(section.digest)
            tokens, mask = np.concatenate([tokens, section.tokens]), np.concatenate([mask, section.mask])
            while len(tokens) >= self.seq_len:
                scored = mask[: self.seq_len] & may_count
                if scored.any():
                    packed.append((tokens[: self.seq_len], scored))
                tokens, mask = tokens[self.seq_len :], mask[self.seq_len :]
                if len(packed) == wanted:
                    return packed
        return packed
