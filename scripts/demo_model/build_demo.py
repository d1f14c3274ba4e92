r"""Put a trained demo model and its data where the package ships them.

python -m scripts.demo_model.build_demo --corpus build/corpus --model build/demo

The shipped data are text of the public domain that training set aside, and recall tasks planted in it. Without
`--model` the model that is there stays, and the data are made anew.

Or write data to another folder, of any length and as much as you need (`scripts.bench.search.strategies --data`): of
all documents that training set aside, whatever their licence.

python -m scripts.demo_model.build_demo --corpus build/corpus --data build/data4096 --seq-len 4096 \
    --calibration-recall 64
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from indexcache_search import demo
from scripts.demo_model.recall import ANSWER, RecallTasks

SEQ_LEN = 512
CALIBRATION_SEED, EVALUATION_SEED = 101, 202
CALIBRATION_RECALL_PER_TASK = 8
EVALUATION_RECALL = 48
TEXT_CHARS = {"calibration": 200_000, "evaluation": 240_000}
PARTS = ("calibration", "evaluation")
LEAST_DOCUMENT_CHARS = 400
MAX_DOCUMENT_CHARS = 6_000  # of a document that ships: more, shorter documents say more about a language model
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "model_max_length": 4096,
    "clean_up_tokenization_spaces": False,
}


def read_rows(corpus: Path, part: str) -> list[dict[str, Any]]:
    """Read the documents that training set aside for `part`."""
    return [json.loads(line) for line in (corpus / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]


def split_lines(text: str) -> list[str]:
    """Split `text` into whole lines, in pieces of at most `MAX_DOCUMENT_CHARS` (a line that is longer stays whole)."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len(pieces[-1]) + len(line) > MAX_DOCUMENT_CHARS:
            pieces.append("")
        pieces[-1] += line
    return pieces


def write_text(documents: Sequence[str], target: Path, characters: int) -> None:
    """Write `documents` until they hold `characters`."""
    lines, total = [], 0
    for text in documents:
        lines.append(json.dumps({"text": text}, ensure_ascii=False))
        total += len(text)
        if total >= characters:
            break
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_recall(tasks: RecallTasks, names: tuple[str, ...], each: int, seq_len: int, target: Path) -> None:
    """Write `each` sequences of every task; only answers count in their loss mask."""
    lines = []
    for name in names:
        batch = tasks.sample(name, each, seq_len)
        for tokens, kind in zip(batch.tokens.tolist(), (batch.kind == ANSWER).int().tolist(), strict=True):
            lines.append(json.dumps({"input_ids": tokens, "loss_mask": kind}, separators=(",", ":")))
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Source:
    """Text that one part of the data is made of.

    Attributes:
        documents: its text.
        stream: `[tokens]` int32 of text that recall tasks are planted in.
    """

    documents: Sequence[str]
    stream: Tensor


def set_aside(corpus: Path) -> dict[str, Source]:
    """Return everything that training set aside, whatever its licence."""
    arrays = np.load(corpus / "corpus.npz")
    return {
        part: Source(
            [row["text"][:MAX_DOCUMENT_CHARS] for row in read_rows(corpus, part)],
            torch.from_numpy(arrays[part].astype(np.int32)),
        )
        for part in PARTS
    }


def public_domain(corpus: Path) -> dict[str, Source]:
    """Return the public-domain text that training set aside, in pieces, by turns for calibration and evaluation."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    end = tokenizer.token_to_id(str(TOKENIZER_CONFIG["eos_token"]))
    texts = [row["text"] for part in PARTS for row in read_rows(corpus, part) if row["public_domain"]]
    pieces = [piece for text in texts for piece in split_lines(text) if len(piece) >= LEAST_DOCUMENT_CHARS]
    pieces.sort(key=lambda piece: hashlib.sha256(piece.encode()).digest())
    return {
        part: Source(
            pieces[turn :: len(PARTS)],
            torch.tensor(
                [token for text in pieces[turn :: len(PARTS)] for token in (*tokenizer.encode(text).ids, end)],
                dtype=torch.int32,
            ),
        )
        for turn, part in enumerate(PARTS)
    }


def write_data(
    corpus: Path,
    sources: Mapping[str, Source],
    data: Path,
    seq_len: int,
    calibration_recall: int,
    text_chars: Mapping[str, int],
    apart: bool = False,
) -> None:
    """Write the calibration and held-out sets: text as it is, recall tasks as sequences of `seq_len` tokens.

    Args:
        corpus: what `scripts.demo_model.corpus` wrote, for the words of recall tasks.
        sources: what each of `PARTS` is made of.
        data: folder to write to.
        seq_len: tokens of a recall sequence.
        calibration_recall: recall sequences of each task, for calibration.
        text_chars: of each of `PARTS`, at most.
        apart: whether calibration has a file for each recall task, too, so that each counts the same.
    """
    data.mkdir(parents=True, exist_ok=True)
    write_text(sources["calibration"].documents, data / "calibration-text.jsonl", text_chars["calibration"])
    write_text(sources["evaluation"].documents, data / "text.jsonl", text_chars["evaluation"])
    words = torch.from_numpy(np.load(corpus / "corpus.npz")["words"])
    tasks = RecallTasks(sources["calibration"].stream, words, CALIBRATION_SEED)
    parts = {name: (name,) for name in demo.RECALL_TASKS} if apart else {"recall": demo.RECALL_TASKS}
    for part, names in parts.items():
        write_recall(tasks, names, calibration_recall, seq_len, data / f"calibration-{part}.jsonl")
    for name in demo.RECALL_TASKS:
        tasks = RecallTasks(sources["evaluation"].stream, words, EVALUATION_SEED)
        write_recall(tasks, (name,), EVALUATION_RECALL, seq_len, data / f"{name}.jsonl")


def main(corpus: Path, model: Path | None) -> None:
    demo.MODEL.mkdir(parents=True, exist_ok=True)
    if model is not None:
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(model / name, demo.MODEL / name)
        shutil.copyfile(corpus / "tokenizer.json", demo.MODEL / "tokenizer.json")
    (demo.MODEL / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    folder = demo.FOLDER / "data"
    write_data(corpus, public_domain(corpus), folder, SEQ_LEN, CALIBRATION_RECALL_PER_TASK, TEXT_CHARS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--model", type=Path, help="a trained model; without it the one that ships stays")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="write data alone, here")
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN, help="tokens of a sequence, for --data")
    parser.add_argument("--calibration-recall", type=int, default=CALIBRATION_RECALL_PER_TASK, help="sequences a task")
    parser.add_argument("--text-chars", type=int, default=TEXT_CHARS["calibration"], help="of calibration text")
    parser.add_argument("--apart", action="store_true", help="a calibration file for each recall task, for --data")
    options = parser.parse_args()
    if options.data is None:
        main(options.corpus, options.model)
    else:
        characters = {**TEXT_CHARS, "calibration": options.text_chars}
        if options.seq_len > SEQ_LEN:
            characters["evaluation"] *= options.seq_len // SEQ_LEN
        sources = set_aside(options.corpus)
        recall, apart = options.calibration_recall, options.apart
        write_data(options.corpus, sources, options.data, options.seq_len, recall, characters, apart)
