"""Batches for training a model that looks things up: text, recall tasks, and the tasks of `indexcache-eval --tasks`.

A batch is a function of its number and the seed, so a training that goes on needs no state of any generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from indexcache_search.eval.tasks import TASKS, sample
from scripts.demo_model.recall import TEXT, UNSCORED, Batch, RecallTasks
from scripts.demo_model.train_demo_model import MIXTURE

TASK = 3  # beside recall's kinds of targets: an answer of `eval.tasks`
TASK_NAMES = tuple(name for name in TASKS if name != "common_words")  # counting words is not looking up
SHORTEST = 512  # tokens of a sequence that has room for any of them
WORDS, FEW = 1024, 256  # most frequent words that records are made of, the few in sequences below `SHORTEST`: the fewer
# there are, the sooner looking them up is learned (the demo model learned it with 377)
FIRST_SEED = 1_000_000  # of samples for training; evaluations count from 0
_PARTS = {"train": 0, "evaluation": 1}


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batches of one length by number: tokens `[batch, length]` int64, and the kind of each as a target, int8.

    Args:
        corpus: folder that `scripts.demo_model.corpus` wrote.
        part: `train` or `evaluation`.
        length: tokens of a sequence; below `SHORTEST` there are no samples of `eval.tasks`.
        batch: sequences of a batch.
        seed: batches of other seeds are others.
        tasks: share of the sequences that are samples of `eval.tasks`.
        mixture: share of each recall task among the others.
    """

    def __init__(
        self,
        corpus: Path,
        part: str,
        length: int,
        batch: int,
        seed: int,
        tasks: float = 0.4,
        mixture: Mapping[str, float] = MIXTURE,
    ) -> None:
        arrays = np.load(corpus / "corpus.npz")
        self._text = torch.from_numpy(arrays[part].astype(np.int32))
        words = arrays["words"][-(WORDS if length >= SHORTEST else FEW) :]
        self._recall = RecallTasks(self._text, torch.from_numpy(words), 0)
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(corpus / "tokenizer.json"))
        self._length, self._batch, self._mixture = length, batch, dict(mixture)
        self._samples = round(batch * tasks) if length >= SHORTEST else 0
        self._seed = 2 * seed + _PARTS[part]

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Draw batch `number`."""
        rng = np.random.default_rng([self._seed, number])
        self._recall.generator.manual_seed(int(rng.integers(2**62)))
        parts = [self._recall.drawn(self._mixture, self._batch - self._samples, self._length)]
        parts += [self._sample(rng) for _ in range(self._samples)]
        return torch.cat([part.tokens for part in parts]), torch.cat([part.kind for part in parts])

    def _sample(self, rng: np.random.Generator) -> Batch:
        """Draw one sample of `eval.tasks`."""
        start = int(rng.integers(self._text.numel() - self._length))
        haystack = self._text[start : start + self._length].tolist()
        name = TASK_NAMES[int(rng.integers(len(TASK_NAMES)))]
        seed = FIRST_SEED + int(rng.integers(2**40))
        drawn = sample(name, self._tokenizer, haystack, self._length, seed, chat=False)
        kind = torch.where(torch.from_numpy(drawn.mask), TASK, TEXT).to(torch.int8)
        return Batch(torch.from_numpy(drawn.tokens).long()[None], kind[None])


def scored(kind: Tensor) -> Tensor:
    """Return which targets of a batch count, as 0 and 1: all that can be predicted, of a `TASK` its answer alone."""
    answers = kind == TASK
    return torch.where(answers.any(1, keepdim=True), answers, kind != UNSCORED).int()
