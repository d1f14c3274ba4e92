"""Measuring patterns on transformers, and servers over HTTP, on the same sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from indexcache_search.compare.endpoints import Endpoint
from indexcache_search.compare.held_out import HeldOut
from indexcache_search.comparison import Row
from indexcache_search.engines.base import Evaluation
from indexcache_search.evaluator import Evaluator
from indexcache_search.line import NAMED, Line
from indexcache_search.plans import order
from sglang_indexcache import Pattern
from sglang_indexcache.address import Address

TOGETHER = 24  # sequences that all patterns run before the next ones: the states of one pattern's run are kept
Done = Callable[[int], None]
"""Told how many sequences have been run."""


@dataclass(frozen=True)
class Compared:
    """One line of a comparison.

    Attributes:
        row: name, retention, pattern and losses.
        divergence: `kl` to the baseline, where it can be measured.
        generated: by sequence, the share of a task's answers that the server's own text holds.
    """

    row: Row
    divergence: Evaluation | None
    generated: Mapping[int, float]


def patterns(losses: Evaluator, divergences: Evaluator, named: Sequence[Line], held_out: HeldOut) -> list[Compared]:
    """The baseline and each named pattern: loss, accuracy with the right answer so far given, and `kl`.

    A task's answer counts as generated where all of its tokens are the likeliest: greedy decoding would have given it.

    Args:
        losses: evaluates `nll`.
        divergences: evaluates `kl`.
        named: lines with patterns.
        held_out: the evaluators' data.
    """
    lines = [Line.baseline(losses.engine.model.native), *named]
    chosen = [line.pattern for line in lines if line.pattern is not None]
    alike = sorted(set(chosen), key=order)  # those that begin alike follow each other
    number = held_out.data.num_sequences
    for start in range(0, number, TOGETHER):
        rows = range(start, min(start + TOGETHER, number))
        for pattern in alike:  # finds the layers of the one before; its divergences find all layers
            losses.evaluations([pattern], rows)
            divergences.evaluations([pattern], rows)
    compared = []
    for line, loss, divergence in zip(lines, losses.evaluations(chosen), divergences.evaluations(chosen), strict=True):
        compared.append(Compared(Row(line, loss), divergence, _whole(loss, held_out)))
    return compared


def _whole(evaluation: Evaluation, held_out: HeldOut) -> dict[int, float]:
    return {row: float(evaluation.correct[row] == evaluation.tokens[row]) for row in held_out.answers}


def servers(addresses: Sequence[Address], held_out: HeldOut, done: Done) -> list[Compared]:
    """Each server: loss and accuracy of the prompt's tokens, and what it generates for the tasks.

    Raises:
        SearchError: if a server does not answer, or gives no logprobs of a prompt.
    """
    data, compared = held_out.data, []
    for number, address in enumerate(addresses):
        endpoint, began = Endpoint(address), time.monotonic()
        losses, correct, generated = [], [], {}
        for row in range(data.num_sequences):
            tokens, scored = data.tokens[row].tolist(), data.scored[row]
            pairs, targets = endpoint.logprobs(tokens), np.flatnonzero(scored) - 1
            losses.append(-float(sum(pairs[at][0] for at in targets)))
            correct.append(sum(pairs[at][1] for at in targets))
            if row in held_out.answers:
                first = int(np.flatnonzero(scored)[0])
                text = endpoint.generate(tokens[:first], len(tokens) - first + 8)
                answers = held_out.answers[row]
                generated[row] = sum(answer in text for answer in answers) / len(answers)
            done(1)
        counts = tuple(int(count) for count in data.scored.sum(axis=1))
        rows, none = tuple(range(data.num_sequences)), (0,) * data.num_sequences
        unknown = Pattern("F")  # an evaluation has a pattern; the line says that a server's is not known
        evaluation = Evaluation(unknown, rows, tuple(losses), tuple(correct), counts, none, time.monotonic() - began)
        line = Line(NAMED, endpoint.url, None, None) if number else Line.baseline(None)
        compared.append(Compared(Row(line, evaluation), None, generated))
    return compared
