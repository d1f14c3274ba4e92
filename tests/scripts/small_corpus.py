"""A corpus of the demo's form in a moment: random tokens, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo_model.corpus import SPECIAL_TOKENS

VOCAB = 512


def write_corpus(folder: Path) -> Path:
    """Write it into `folder`, and return that."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["Note: the code of the third note about them is what they say. " * 9], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = np.random.default_rng(0)
    streams = {part: generator.integers(10, 200, 40_000).astype(np.uint16) for part in ("train", "evaluation")}
    np.savez(folder / "corpus.npz", words=np.arange(100, 164), **streams)
    return folder
