"""Pieces of the packed corpus, which travel one by one and are put together where the model trains.

    python -m scripts.large_corpus join build/large/pieces --output build/corpus

A piece is a file of xz, of token ids in uint16 (little-endian), each document ended by `<|eos|>`; documents are in an
order by chance, so that each piece is a sample of its kind. `manifest.json` names all, with sha256 of the files and of
what is in them. A missing or damaged piece is refused by its name. `--partial` leaves missing ones of the training part
out, and says how many tokens are there.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from indexcache_search.workdir.lock import locked
from scripts.demo_model.corpus import key_words
from sglang_indexcache.io.atomic import write_atomically
from sglang_indexcache.io.digest import file_digest

MANIFEST, TOKENIZER, SCHEMA = "manifest.json", "tokenizer.json", "indexcache-corpus/v1"
PARTS = ("train", "evaluation", "packages")
KINDS = ("prose", "code")
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**26, "lc": 3, "lp": 1, "pb": 1}]


@dataclass(frozen=True)
class Piece:
    """A line of the manifest.

    Attributes:
        name: `PART-KIND-NUMBER`; the file is `NAME.xz`.
        tokens: in it, with the ends of documents.
        documents: in it.
        characters: of their text.
        bytes: of the file.
        sha256: of the file.
        ids_sha256: of the token ids.
    """

    name: str
    tokens: int
    documents: int
    characters: int
    bytes: int
    sha256: str
    ids_sha256: str

    @property
    def part(self) -> tuple[str, str]:
        """The part, and prose or code."""
        part, kind, _ = self.name.split("-")
        return part, kind


def write_piece(folder: Path, name: str, ids: np.ndarray, documents: int, characters: int) -> Piece:
    """Write the file of a piece, whole or not at all."""
    data = ids.astype("<u2").tobytes()
    packed = lzma.compress(data, format=lzma.FORMAT_XZ, filters=FILTERS)
    path = folder / f"{name}.xz"
    partial = path.with_suffix(".part")
    partial.write_bytes(packed)
    partial.rename(path)
    digests = (hashlib.sha256(packed).hexdigest(), hashlib.sha256(data).hexdigest())
    return Piece(name, ids.size, documents, characters, len(packed), *digests)


def write_manifest(folder: Path, pieces: Sequence[Piece]) -> None:
    """Write the manifest, once all pieces and the tokenizer are there."""
    tokenizer, rows = file_digest(folder / TOKENIZER).sha256, [asdict(item) for item in pieces]
    about = {"schema": SCHEMA, "tokenizer_sha256": tokenizer, "pieces": rows, "sha256": _digest(tokenizer, rows)}
    write_atomically(folder / MANIFEST, json.dumps(about, indent=1) + "\n")


def _digest(tokenizer: str, rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps([tokenizer, rows], sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> tuple[list[Piece], str]:
    """Return the pieces, and the sha256 of the tokenizer.

    Raises:
        SystemExit: if it is no manifest of this version, or damaged.
    """
    try:
        found = json.loads(path.read_text())
        if found["schema"] != SCHEMA:
            raise SystemExit(f"{path}: schema is {found['schema']}, expected {SCHEMA}")
        tokenizer, rows = found["tokenizer_sha256"], found["pieces"]
        if (digest := _digest(tokenizer, rows)) != found["sha256"]:
            raise SystemExit(f"{path}: sha256 of what it says is {digest}, expected {found['sha256']}")
        return [Piece(**item) for item in rows], tokenizer
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: {type(error).__name__}: {error}; expected the manifest of a corpus") from None


def read_piece(piece: Piece, path: Path) -> np.ndarray:
    """Return the token ids of a piece, `[tokens]` uint16.

    Raises:
        SystemExit: if it is damaged.
    """
    packed = path.read_bytes()
    if (found := hashlib.sha256(packed).hexdigest()) != piece.sha256:
        raise SystemExit(f"{path}: {len(packed)} bytes with sha256 {found}, expected {piece.bytes} with {piece.sha256}")
    data = lzma.decompress(packed)
    if hashlib.sha256(data).hexdigest() != piece.ids_sha256:
        raise SystemExit(
            f"{path}: other token ids than the manifest has, expected {piece.tokens} of {piece.ids_sha256}"
        )
    return np.frombuffer(data, "<u2")


def join(folders: Sequence[Path], output: Path, partial: bool) -> None:
    """Put the pieces together into the corpus that trainings read: `corpus.npz`, the tokenizer, held-out documents.

    Args:
        folders: with the pieces, the manifest and the tokenizer among them.
        output: folder of the corpus; `corpus.npz`, by which it counts as complete, comes last.
        partial: go on without pieces of the training part that are missing.

    Raises:
        SystemExit: if a piece is missing or damaged.
    """
    output.mkdir(parents=True, exist_ok=True)
    with locked(output, "scripts.large_corpus join"):
        pieces, expected = read_manifest(_found(folders, MANIFEST))
        tokenizer = _found(folders, TOKENIZER)
        if (found := file_digest(tokenizer).sha256) != expected:
            raise SystemExit(f"{tokenizer}: sha256 is {found}, expected {expected}")
        there = [item for item in pieces if any((folder / f"{item.name}.xz").exists() for folder in folders)]
        missing = [item.name for item in pieces if item not in there]
        if [name for name in missing if not partial or not name.startswith("train-")]:
            hint = "" if partial else ", or --partial"
            raise SystemExit(f"missing: {', '.join(missing)}; expected all {len(pieces)} pieces{hint}")
        ids = {part: np.empty(0, np.uint16) for part in sorted({item.part for item in pieces})}
        for part in ids:
            chosen = [item for item in there if item.part == part]
            ids[part] = np.concatenate([ids[part], *(read_piece(x, _found(folders, f"{x.name}.xz")) for x in chosen)])
        _write(output, tokenizer, ids)
    share = sum(item.tokens for item in there) / max(1, sum(item.tokens for item in pieces))
    print(f"{output}: {sum(item.tokens for item in there):,} tokens of {len(there)} pieces, {share:.0%} of all")


def _found(folders: Sequence[Path], name: str) -> Path:
    path = next((folder / name for folder in folders if (folder / name).exists()), None)
    if path is None:
        raise SystemExit(f"{name}: in none of {', '.join(map(str, folders))}, expected it among the pieces")
    return path


def _write(output: Path, source: Path, ids: Mapping[tuple[str, str], np.ndarray]) -> None:
    """Write what `scripts.demo_model.mixture` and `scripts.bench.search.scale` read."""
    tokenizer = Tokenizer.from_file(str(source))
    write_atomically(output / TOKENIZER, source.read_text())
    streams = {name: np.concatenate([ids[part] for part in sorted(ids) if part[0] == name]) for name in PARTS}
    end = tokenizer.token_to_id("<|eos|>")
    assert end is not None
    for name in PARTS[1:]:
        texts = tokenizer.decode_batch([item.tolist() for item in documents(streams[name], end)])
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
        write_atomically(output / f"{name}.jsonl", "\n".join(lines) + "\n")
    counts = np.bincount(streams["train"], minlength=tokenizer.get_vocab_size())
    apart = {"-".join(part): stream for part, stream in ids.items() if part[0] != "train"}
    with (output / "corpus.part").open("wb") as file:
        arrays: dict[str, Any] = {"words": key_words(tokenizer, counts), **streams, **apart}
        np.savez(file, **arrays)
    (output / "corpus.part").rename(output / "corpus.npz")


def documents(stream: np.ndarray, end: int) -> list[np.ndarray]:
    """Return the token ids of each document, without its end."""
    return [
        item[:-1] if item[-1] == end else item
        for item in np.split(stream, np.flatnonzero(stream == end) + 1)
        if item.size
    ]
