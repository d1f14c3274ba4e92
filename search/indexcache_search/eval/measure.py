"""Measurements of patterns on transformers, and of servers over HTTP, on the same sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from indexcache_search.engines.base import Engine
from indexcache_search.eval.endpoints import Endpoint
from indexcache_search.eval.held_out import ComparisonSet
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Losses
from indexcache_search.evaluation.plan import order
from indexcache_search.results.variant import NAMED, Variant, VariantLosses
from sglang_indexcache.http.address import Address

TOGETHER = 24  # sequences run under all patterns before the next ones, since only one pattern's states are kept
Done = Callable[[int], None]
"""A callback with the number of sequences that have been run."""


@dataclass(frozen=True)
class Compared(VariantLosses):
    """One line of a comparison, with what else was measured.

    Attributes:
        divergence: `kl` to the baseline, where it can be measured.
        generated: by sequence, the share of a task's answers found in the server's own text.
        extra: see `schema.Row`.
    """

    divergence: Losses | None
    generated: Mapping[int, float]
    extra: Mapping[str, Estimate] = field(default_factory=dict)


def patterns(
    engine: Engine, journal: Journal, named: Sequence[Variant], held_out: ComparisonSet, done: Done
) -> list[Compared]:
    """Measure the baseline and each named pattern: loss, teacher-forced accuracy, and `kl`.

    A task's answer counts as generated if all of its tokens are the likeliest, as greedy decoding would give them.

    Args:
        engine: runs the patterns.
        journal: keeps earlier evaluations.
        named: lines with patterns.
        held_out: the sequences.
        done: called with numbers of sequences; each sequence counts once for its loss and once for its divergence.
    """
    losses = Evaluator(engine, held_out.data, "nll", journal, "nll", lambda item: done(len(item.rows)))
    divergences = Evaluator(engine, held_out.data, "kl", journal, "kl", losses.on_evaluation)
    lines = [Variant.baseline(engine.model.native), *named]
    chosen = [line.pattern for line in lines if line.pattern is not None]
    alike = sorted(set(chosen), key=order)  # patterns with equal first layers follow each other
    number = held_out.data.num_sequences
    for start in range(0, number, TOGETHER):
        rows = range(start, min(start + TOGETHER, number))
        for pattern in alike:  # reuses the layers of the pattern before; its divergences reuse all layers
            losses.evaluations([pattern], rows)
            divergences.evaluations([pattern], rows)
    compared = []
    for line, loss, divergence in zip(lines, losses.evaluations(chosen), divergences.evaluations(chosen), strict=True):
        compared.append(Compared(line, loss, divergence, _whole(loss, held_out)))
    return compared


def _whole(evaluation: Losses, held_out: ComparisonSet) -> dict[int, float]:
    return {row: float(evaluation.correct[row] == evaluation.tokens[row]) for row in held_out.answers}


def servers(addresses: Sequence[Address], held_out: ComparisonSet, done: Done) -> list[Compared]:
    """Measure each server: loss and accuracy of the prompt's tokens, and its replies to the tasks.

    Raises:
        SearchError: if a server does not answer, or gives no logprobs of a prompt.
    """
    data, compared = held_out.data, []
    for number, address in enumerate(addresses):
        endpoint, losses, correct, generated = Endpoint(address), [], [], {}
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
        rows = tuple(range(data.num_sequences))
        found = Losses(rows=rows, losses=tuple(losses), tokens=counts, correct=tuple(correct))
        line = Variant(NAMED, endpoint.url, None, None) if number else Variant.baseline(None)
        compared.append(Compared(line, found, None, generated))
    return compared
