"""Make the large corpus: read, drop near-duplicates, hold out, train a tokenizer, pack.

    python -m scripts.large_corpus make --output build/large

Each part leaves a file when it is done, and the same command goes on behind the last one; what it makes does not depend
on where it was killed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from indexcache_search.workdir.lock import locked
from scripts.demo_model.corpus import SPECIAL_TOKENS, train_tokenizer
from scripts.large_corpus.archives import Archives, members
from scripts.large_corpus.documents import chosen, documents, number_of
from scripts.large_corpus.duplicates import Seen, fingerprints
from scripts.large_corpus.pieces import TOKENIZER, Piece, write_manifest, write_piece
from scripts.large_corpus.sources import Source
from sglang_indexcache.io.atomic import write_atomically

HELD_OUT = 0.01  # of the documents of each package that trains
REPEATED, HELD_OUT_REPEATED = 0.5, 0.2  # share of a document in earlier ones, and in held-out ones, from which it goes
MOST_OF_A_DICTIONARY = 16_384
TRAINED_ON = 40e6  # characters that the tokenizer is trained on
PIECE = 60e6  # characters of a piece at most: about 14 MiB of xz
BATCH = 256  # documents encoded at once
Row = dict[str, Any]


class Build:
    """The corpus below one folder.

    Args:
        folder: all that is made.
        sources: packages to read.
        vocab_size: of the tokenizer, at most 65,536.
        piece: characters of a piece.
    """

    def __init__(
        self, folder: Path, sources: Sequence[Source], vocab_size: int = MOST_OF_A_DICTIONARY, piece: float = PIECE
    ) -> None:
        self._folder, self._sources, self._vocab_size, self._piece = folder, sources, vocab_size, piece
        self._archives = Archives(folder)
        self._began = time.monotonic()

    def make(self, least: int) -> None:
        """Do all that is not done.

        Args:
            least: tokens of the training part that are enough.

        Raises:
            SystemExit: if there are fewer, or the folder is another corpus's.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder, "scripts.large_corpus make"):
            self._check_same()
            for number, source in enumerate(self._sources):
                self._read(source, f"{number + 1}/{len(self._sources)}")
            self._keep()
            self._train_tokenizer()
            pieces = self._pack()
        tokens = sum(item.tokens for item in pieces if item.part[0] == "train")
        size = sum(item.bytes for item in pieces)
        self._say(f"{tokens:,} tokens to train on, {len(pieces)} pieces, {size / 2**20:.1f} MiB")
        if tokens < least:
            raise SystemExit(f"{self._folder}: {tokens:,} tokens to train on, expected {least:,} or more")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", flush=True)

    def _check_same(self) -> None:
        """Refuse a folder that was begun with other sources or sizes."""
        path = self._folder / "settings.json"
        settings = {"vocab_size": self._vocab_size, "piece": self._piece, "sources": [asdict(x) for x in self._sources]}
        if path.exists() and (found := json.loads(path.read_text())) != settings:
            names = ", ".join(key for key, value in settings.items() if found.get(key) != value)
            raise SystemExit(f"{path}: other {names} than these, expected the same; take another --output")
        write_atomically(path, json.dumps(settings, indent=1) + "\n")

    # -- documents

    def _documents_of(self, source: Source) -> Path:
        return self._folder / "documents" / f"{source.name}.jsonl"

    def _read(self, source: Source, place: str) -> None:
        """Write the documents of a source."""
        path = self._documents_of(source)
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        archives = self._archives.fetch(source)
        files = (item for archive in archives for item in members(archive))
        partial, size = path.with_suffix(".part"), 0
        with partial.open("w") as file:
            for item in documents(chosen(files, {"prose": source.prose, "code": source.code})):
                if not any(word in item.text for word in SPECIAL_TOKENS):
                    file.write(json.dumps(asdict(item)) + "\n")
                    size += len(item.text)
        partial.rename(path)
        self._say(f"{place} {source.name}: {size / 1e6:.1f} million characters")

    def _rows(self, source: Source) -> list[Row]:
        with self._documents_of(source).open() as file:
            return [{**json.loads(line), "source": source.name} for line in file]

    def _keep(self) -> None:
        """Choose the parts, drop near-duplicates, and write a file of documents for each piece.

        Held-out documents come first: what repeats them is not trained on.
        """
        kept = self._folder / "kept"
        if kept.exists():
            return
        shutil.rmtree(kept.with_suffix(".part"), ignore_errors=True)
        kept.with_suffix(".part").mkdir()
        parts: dict[tuple[str, str], list[Row]] = {}
        held_out, trained = Seen(), Seen()
        count: dict[str, list[int]] = {}
        for part in ("packages", "evaluation", "train"):
            for source in self._sources:
                if source.held_out != (part == "packages"):
                    continue
                for row in self._rows(source):
                    if not source.held_out and (part == "train") == self._is_held_out(row):
                        continue
                    found = fingerprints(row["text"])
                    seen = trained if part == "train" else held_out
                    drop = seen.share(found) >= REPEATED or (
                        part == "train" and held_out.share(found) >= HELD_OUT_REPEATED
                    )
                    sizes = count.setdefault(source.name, [0, 0])
                    sizes[drop] += len(row["text"])
                    if not drop:
                        seen.add(found)
                        parts.setdefault((part, row["kind"]), []).append(row)
        for (part, kind), rows in sorted(parts.items()):
            rows.sort(key=lambda row: number_of("order", row["source"], row["path"]))
            for number, piece in enumerate(_cut(rows, self._piece)):
                path = kept.with_suffix(".part") / f"{part}-{kind}-{number:02d}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in piece))
        table = {name: {"kept": kept_, "repeated": repeated} for name, (kept_, repeated) in count.items()}
        (kept.with_suffix(".part") / "characters.json").write_text(json.dumps(table, indent=1) + "\n")
        kept.with_suffix(".part").rename(kept)
        total, repeated = (sum(sizes[number] for sizes in count.values()) / 1e6 for number in (0, 1))
        self._say(f"{total:.1f} million characters kept, {repeated:.1f} left out as repeated")

    @staticmethod
    def _is_held_out(row: Row) -> bool:
        return number_of("held out", row["source"], row["path"]) < HELD_OUT * 2**64

    # -- tokens

    def _train_tokenizer(self) -> None:
        path = self._folder / "pieces" / TOKENIZER
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        files = sorted((self._folder / "kept").glob("train-*.jsonl"))
        texts: list[str] = []
        for file in files:
            room = TRAINED_ON / len(files)
            for text in _texts(file):
                texts.append(text[: int(room)])
                room -= len(text)
                if room <= 0:
                    break
        train_tokenizer(texts, self._vocab_size).save(str(path.with_suffix(".part")))
        path.with_suffix(".part").rename(path)
        self._say(f"tokenizer of {sum(map(len, texts)) / 1e6:.1f} million characters")

    def _pack(self) -> list[Piece]:
        """Write the pieces, and their manifest once all are there."""
        folder = self._folder / "pieces"
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        end, pieces = tokenizer.token_to_id("<|eos|>"), []
        for path in sorted((self._folder / "kept").glob("*.jsonl")):
            about = folder / f"{path.stem}.json"
            if not about.exists():
                parts, characters, count = [], 0, 0
                for texts in _batches(_texts(path)):
                    encoded = tokenizer.encode_batch_fast(texts)
                    parts += [np.array([*item.ids, end], np.uint16) for item in encoded]
                    characters, count = characters + sum(map(len, texts)), count + len(texts)
                piece = write_piece(folder, path.stem, np.concatenate(parts), count, characters)
                write_atomically(about, json.dumps(asdict(piece)) + "\n")
                self._say(f"{piece.name}: {piece.tokens:,} tokens, {piece.bytes / 2**20:.2f} MiB")
            pieces.append(Piece(**json.loads(about.read_text())))
        write_manifest(folder, pieces)
        return pieces


def _cut(rows: Sequence[Row], characters: float) -> Iterator[list[Row]]:
    """Yield runs of documents that have so many characters together, the last one fewer."""
    piece: list[Row] = []
    size = 0
    for row in rows:
        piece.append(row)
        size += len(row["text"])
        if size >= characters:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _texts(path: Path) -> Iterator[str]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)["text"]


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
