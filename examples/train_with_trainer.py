"""Train a DSA model for a pattern in Hugging Face's Trainer.

    pip install accelerate
    python examples/train_with_trainer.py [FOLDER OR HUB ID]

The demo model by default: 8 steps on two sequences packed into a row, about a minute on two cores. A warm-up comes
first when a model's indexers know nothing yet: the same with stage="warmup".
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from indexcache_search import demo
from indexcache_train.distill.adapters.huggingface import IndexerLoss, parameter_groups
from sglang_indexcache import Pattern

LENGTH, STEPS = 128, 8


def packed(rows: list[list[int]]) -> dict[str, Any]:
    """Pack sequences into one row: positions begin anew, and no sequence predicts the next one's first token."""
    return {
        "input_ids": [token for row in rows for token in row],
        "position_ids": [position for row in rows for position in range(len(row))],
        "labels": [label for row in rows for label in (-100, *row[1:])],
    }


name = sys.argv[1] if len(sys.argv) > 1 else demo.MODEL
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
pattern = Pattern.uniform(model.config.num_hidden_layers, keep_every=4)
tokenizer = AutoTokenizer.from_pretrained(name)
with demo.data_file("text").open() as file:
    texts = [json.loads(line)["text"] for _, line in zip(range(2 * STEPS), file, strict=False)]
sequences = [tokenizer.encode(text)[:LENGTH] for text in texts]
data = [packed(sequences[first : first + 2]) for first in range(0, len(sequences), 2)]

loss = IndexerLoss(model, pattern, stage="sparse")
trainer = Trainer(
    model,
    TrainingArguments("trained", max_steps=STEPS, per_device_train_batch_size=1, logging_steps=1, report_to=[]),
    train_dataset=data,  # type: ignore[arg-type]
    optimizers=(torch.optim.AdamW(parameter_groups(model, lr=7.3e-6, indexer_lr=1e-3)), None),
)
with loss.attached():
    trainer.train()
    trainer.save_model("trained/model")
assert loss.divergences is not None
print("KL of the indexers:", " ".join(f"{value:.3f}" for value in loss.divergences.tolist()))
