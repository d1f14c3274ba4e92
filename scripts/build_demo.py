"""Put a trained demo model and its data where the package ships them.

python -m scripts.build_demo --corpus build/corpus --model build/demo

Or write data of the same kind to another folder, of any length and as much as is asked for (`bench_search --data`):

python -m scripts.build_demo --corpus build/corpus --data build/data4096 --seq-len 4096 --calibration-recall 64
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from indexcache_search import demo
from scripts.demo_model.recall import ANSWER, RecallTasks

SEQ_LEN = 512
CALIBRATION_SEED, EVALUATION_SEED = 101, 202
CALIBRATION_RECALL_PER_TASK = 8
EVALUATION_RECALL = 48
TEXT_CHARS = {"calibration": 200_000, "evaluation": 240_000}
MAX_DOCUMENT_CHARS = 6_000  # of a document that ships: more, shorter documents say more about a language model
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "model_max_length": 4096,
    "clean_up_tokenization_spaces": False,
}


def write_text(source: Path, target: Path, characters: int) -> None:
    """Write documents from `source` until they hold `characters`."""
    lines, total = [], 0
    for line in source.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"][:MAX_DOCUMENT_CHARS]
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


def write_data(corpus: Path, data: Path, seq_len: int, calibration_recall: int, text_chars: Mapping[str, int]) -> None:
    """Write the calibration and held-out sets: text as it is, recall tasks as sequences of `seq_len` tokens."""
    data.mkdir(parents=True, exist_ok=True)
    write_text(corpus / "calibration.jsonl", data / "calibration-text.jsonl", text_chars["calibration"])
    write_text(corpus / "evaluation.jsonl", data / "text.jsonl", text_chars["evaluation"])
    arrays = np.load(corpus / "corpus.npz")
    words = torch.from_numpy(arrays["words"])
    parts = {name: torch.from_numpy(arrays[name].astype(np.int32)) for name in ("calibration", "evaluation")}
    tasks = RecallTasks(parts["calibration"], words, CALIBRATION_SEED)
    write_recall(tasks, demo.RECALL_TASKS, calibration_recall, seq_len, data / "calibration-recall.jsonl")
    for name in demo.RECALL_TASKS:
        tasks = RecallTasks(parts["evaluation"], words, EVALUATION_SEED)
        write_recall(tasks, (name,), EVALUATION_RECALL, seq_len, data / f"{name}.jsonl")


def main(corpus: Path, model: Path) -> None:
    demo.MODEL.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(model / name, demo.MODEL / name)
    shutil.copyfile(corpus / "tokenizer.json", demo.MODEL / "tokenizer.json")
    (demo.MODEL / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    write_data(corpus, demo.FOLDER / "data", SEQ_LEN, CALIBRATION_RECALL_PER_TASK, TEXT_CHARS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--model", type=Path, default=Path("build/demo"))
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="write data alone, here")
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN, help="tokens of a sequence, for --data")
    parser.add_argument("--calibration-recall", type=int, default=CALIBRATION_RECALL_PER_TASK, help="sequences a task")
    parser.add_argument("--text-chars", type=int, default=TEXT_CHARS["calibration"], help="of calibration text")
    options = parser.parse_args()
    if options.data is None:
        main(options.corpus, options.model)
    else:
        characters = {**TEXT_CHARS, "calibration": options.text_chars}
        if options.seq_len > SEQ_LEN:
            characters["evaluation"] *= options.seq_len // SEQ_LEN
        write_data(options.corpus, options.data, options.seq_len, options.calibration_recall, characters)
