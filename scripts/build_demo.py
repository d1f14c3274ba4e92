"""Put a trained demo model and its data where the package ships them.

python -m scripts.build_demo --corpus build/corpus --model build/demo
"""

from __future__ import annotations

import argparse
import json
import shutil
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


def write_recall(tasks: RecallTasks, names: tuple[str, ...], each: int, target: Path) -> None:
    """Write `each` sequences of every task; only answers count in their loss mask."""
    lines = []
    for name in names:
        batch = tasks.sample(name, each, SEQ_LEN)
        for tokens, kind in zip(batch.tokens.tolist(), (batch.kind == ANSWER).int().tolist(), strict=True):
            lines.append(json.dumps({"input_ids": tokens, "loss_mask": kind}, separators=(",", ":")))
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(corpus: Path, model: Path) -> None:
    demo.MODEL.mkdir(parents=True, exist_ok=True)
    data = demo.FOLDER / "data"
    data.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(model / name, demo.MODEL / name)
    shutil.copyfile(corpus / "tokenizer.json", demo.MODEL / "tokenizer.json")
    (demo.MODEL / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    write_text(corpus / "calibration.jsonl", data / "calibration-text.jsonl", TEXT_CHARS["calibration"])
    write_text(corpus / "evaluation.jsonl", data / "text.jsonl", TEXT_CHARS["evaluation"])
    arrays = np.load(corpus / "corpus.npz")
    words = torch.from_numpy(arrays["words"])
    parts = {name: torch.from_numpy(arrays[name].astype(np.int32)) for name in ("calibration", "evaluation")}
    tasks = RecallTasks(parts["calibration"], words, CALIBRATION_SEED)
    write_recall(tasks, demo.RECALL_TASKS, CALIBRATION_RECALL_PER_TASK, data / "calibration-recall.jsonl")
    for name in demo.RECALL_TASKS:
        tasks = RecallTasks(parts["evaluation"], words, EVALUATION_SEED)
        write_recall(tasks, (name,), EVALUATION_RECALL, data / f"{name}.jsonl")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--model", type=Path, default=Path("build/demo"))
    options = parser.parse_args()
    main(options.corpus, options.model)
