"""Batches for training a model that looks things up: text, recall tasks, and the tasks of `indexcache-eval --tasks`.

A batch is a function of its number and the seed, so a training that goes on needs no state of any generator. Its text
comes from windows of the corpus: batches of one size, numbered from 0, read every token once before any token a second
time, whatever their lengths are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from indexcache_tasks.tasks import TASKS, sample
from scripts.demo_model.recall import TEXT, UNSCORED, Batch, RecallTasks
from scripts.demo_model.train_demo_model import MIXTURE

TASK = 3  # beside recall's kinds of targets: an answer of `indexcache_tasks`
TASK_NAMES = tuple(name for name in TASKS if name != "common_words")  # counting words is not looking up
SHORTEST = 512  # tokens of a sequence that has room for any of them
WORDS, FEW = 1024, 256  # most frequent words that records are made of, the few in sequences below `SHORTEST`: the fewer
# there are, the sooner looking them up is learned (the demo model learned it with 377)
FIRST_SEED = 1_000_000  # of samples for training; evaluations count from 0
BLOCK = 8192  # tokens that are read in one go; longer sequences have several
_PARTS = {"train": 0, "evaluation": 1, "packages": 2}


def mixture_of(text: float) -> dict[str, float]:
    """Return `MIXTURE` with another share of text alone."""
    others = sum(share for name, share in MIXTURE.items() if name != "text")
    return {name: text if name == "text" else share * (1 - text) / others for name, share in MIXTURE.items()}


class Windows:
    """The blocks of a token stream, in another order in each pass over it.

    Args:
        tokens: of the stream.
        seed: of the orders.
    """

    def __init__(self, tokens: int, seed: int) -> None:
        self._blocks, self._seed = tokens // BLOCK, seed
        self._spare = tokens - self._blocks * BLOCK
        self._order: tuple[int, np.ndarray, int] = (-1, np.empty(0, np.int64), 0)
        if not self._blocks:
            raise ValueError(f"{tokens} tokens, expected {BLOCK} or more")

    def start(self, place: int) -> int:
        """Return where the token is that comes after `place` others."""
        number, within = divmod(place, BLOCK)
        turn, number = divmod(number, self._blocks)
        if self._order[0] != turn:
            rng = np.random.default_rng([self._seed, turn])
            self._order = (turn, rng.permutation(self._blocks), int(rng.integers(self._spare + 1)))
        return int(self._order[1][number]) * BLOCK + within + self._order[2]


def room(length: int) -> int:
    """Return the tokens that a sequence of `length` takes up: a power of two, or whole blocks."""
    return -(-length // BLOCK) * BLOCK if length > BLOCK else 1 << (length - 1).bit_length()


class _Tasks(RecallTasks):
    """Recall tasks on the text of windows, one after another."""

    def begin(self, windows: Windows, first: int) -> None:
        """Read on from `first` tokens."""
        self._windows, self._next = windows, first

    def text(self, batch: int, length: int) -> Tensor:
        """Take the next windows; a sequence longer than a block has several."""
        part, size = min(length, BLOCK), room(length)
        places = self._next + np.arange(0, batch * size, min(size, BLOCK))
        self._next += batch * size
        starts = torch.tensor([self._windows.start(int(place)) for place in places])
        return self.text_stream[starts[:, None] + torch.arange(part)].view(batch, -1)[:, :length]


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batches of one length by number: tokens `[batch, length]` int64, and the kind of each as a target, int8.

    Args:
        corpus: folder that `scripts.demo_model.corpus` wrote.
        part: `train`, `evaluation`, or `packages` where the corpus has them apart.
        length: tokens of a sequence; below `SHORTEST` there are no samples of `indexcache_tasks`.
        batch: sequences of a batch.
        seed: batches of other seeds are others.
        tasks: share of the sequences that are samples of `indexcache_tasks`.
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
        self._recall = _Tasks(self._text, torch.from_numpy(words), 0)
        self._windows = Windows(self._text.numel(), seed)
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(corpus / "tokenizer.json"))
        self._length, self._batch, self._mixture = length, batch, dict(mixture)
        self._samples = round(batch * tasks) if length >= SHORTEST else 0
        self._seed = 2 * seed + _PARTS[part]

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Draw batch `number`."""
        rng = np.random.default_rng([self._seed, number])
        self._recall.begin(self._windows, number * self._batch * room(self._length))
        self._recall.generator.manual_seed(int(rng.integers(2**62)))
        parts = [self._recall.drawn(self._mixture, self._batch - self._samples, self._length)]
        parts += [self._sample(rng) for _ in range(self._samples)]
        return torch.cat([part.tokens for part in parts]), torch.cat([part.kind for part in parts])

    def _sample(self, rng: np.random.Generator) -> Batch:
        """Draw one sample of `indexcache_tasks`."""
        haystack = self._recall.text(1, self._length)[0].tolist()
        name = TASK_NAMES[int(rng.integers(len(TASK_NAMES)))]
        seed = FIRST_SEED + int(rng.integers(2**40))
        drawn = sample(name, self._tokenizer, haystack, self._length, seed, chat=False)
        kind = torch.where(torch.from_numpy(drawn.mask), TASK, TEXT).to(torch.int8)
        return Batch(torch.from_numpy(drawn.tokens).long()[None], kind[None])


def scored(kind: Tensor) -> Tensor:
    """Return which targets of a batch count, as 0 and 1: all that can be predicted, of a `TASK` its answer alone."""
    answers = kind == TASK
    return torch.where(answers.any(1, keepdim=True), answers, kind != UNSCORED).int()
