"""Data that patterns and servers are compared on: held-out sources, and generated tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from indexcache_search.data.packing import EVALUATION_ORDER_SEED, Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.sketch import Sketch
from indexcache_search.data.templates import AS_THEY_ARE, RowOptions
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import DataError
from indexcache_search.eval.tasks import generated
from sglang_indexcache import ModelLayers


@dataclass(frozen=True)
class ComparisonSet:
    """Sequences of a comparison.

    Attributes:
        data: sequences.
        answers: texts of the answers, by sequence; for samples of tasks only.
        left_out: documents that were left out because a pattern was calibrated on a part of them.
    """

    data: TokenSet
    answers: dict[int, tuple[str, ...]]
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class ComparisonData:
    """Data of a comparison.

    Attributes:
        sources: each gives an equal share of `sequences`, as in `indexcache-search`; may be empty.
        seq_len: tokens of each sequence; `None` means 4 x what a query selects.
        sequences: number of sequences of all sources together.
        tasks: names from `Tasks.names`.
        haystack: source of the text around the needles.
        samples: number of samples of each task.
        chat: put the chat template around a task's text.
        reply: for models with indexers: tokens at the end of each sequence that are read one by one, behind a prompt;
            only these count. Dense models take replies from the data.
        rows: how rows are read.
        only_shown: print the data, and compare nothing.
    """

    sources: tuple[str, ...]
    seq_len: int | None
    sequences: int
    tasks: tuple[str, ...] = ()
    haystack: str = "demo:text"
    samples: int = 16
    chat: bool = False
    reply: int | None = None
    rows: RowOptions = AS_THEY_ARE
    only_shown: bool = False

    def reads(self) -> dict[str, Sequence[str]]:
        """Return the inputs by option, for `check_apart`."""
        return {"--evaluation": self.sources, "--tasks haystack": [self.haystack]}


def build(
    reader: TokenReader, model: ModelLayers, asked: ComparisonData, seq_len: int, calibrated: Sequence[Sketch] = ()
) -> ComparisonSet:
    """Read the sources and generate the tasks.

    Args:
        reader: reads the sources, and has the tokenizer for tasks.
        model: gives `first_sparse_position`.
        asked: the sources and tasks.
        seq_len: tokens of each sequence.
        calibrated: sketches of the texts that the patterns were calibrated on; these are left out.

    Raises:
        DataError: if there is nothing to compare on, or a source has too few tokens.
    """
    sources, tasks, samples = asked.sources, asked.tasks, asked.samples
    if tasks:
        makes = generated()
        try:
            makes.check(tasks)
        except DataError as error:
            raise DataError(f"--tasks: {error}") from None
    clash = [source for source in sources if source.removesuffix("-style") in tasks and source.endswith("-style")]
    if clash:
        raise DataError(f"--evaluation: {clash[0]} is called as a task of --tasks is, expected ./{clash[0]}")
    if not sources and not tasks:
        raise DataError("nothing to compare on, expected --evaluation or --tasks")
    parts, left_out = [], 0
    if sources:
        packer = Packer(reader, model, seq_len, calibrated)
        parts.append(packer.held_out(sources, asked.sequences))
        left_out = packer.left_out
    tokens = [token_set.tokens for token_set in parts]
    scored = [token_set.scored for token_set in parts]
    prompts = [token_set.prompt for token_set in parts if token_set.prompt is not None]
    source_of = [token_set.source_of for token_set in parts]
    names = [*(parts[0].sources if parts else ()), *(f"{task}-style" for task in tasks)]
    answers: dict[int, tuple[str, ...]] = {}
    if tasks:
        tokenizer, text = reader.tokenizer, haystack_of(reader, asked.haystack, seq_len)
    for number, task in enumerate(tasks):
        make = partial(generated().sample, task, tokenizer, text, seq_len, chat=asked.chat)
        made = [make(seed) for seed in range(samples)]
        first = sum(map(len, tokens))
        answers |= {first + index: drawn.answers for index, drawn in enumerate(made)}
        tokens.append(np.stack([drawn.tokens for drawn in made]))
        answered = np.stack([drawn.mask for drawn in made])
        scored.append(answered & (np.arange(seq_len) > model.first_sparse_position))
        prompts.append(~answered)
        source_of.append(np.full(samples, len(names) - len(tasks) + number))
    prompt = np.concatenate(prompts) if reader.replies else None
    data = TokenSet(np.concatenate(tokens), np.concatenate(scored), np.concatenate(source_of), tuple(names), prompt)
    if asked.reply is not None:
        data = data.ending_in_replies(asked.reply)
    return ComparisonSet(data, answers, left_out)


def haystack_of(reader: TokenReader, source: str, seq_len: int) -> list[int]:
    """Return the tokens of which the text around needles is cut: up to the document that makes it 16 x `seq_len`.

    Raises:
        DataError: if the source can't be read.
    """
    text: list[int] = []
    for document in reader.documents(source, EVALUATION_ORDER_SEED):
        text += [token for section in document for token in section.tokens.tolist()]
        if len(text) >= 16 * seq_len:
            break
    return text
