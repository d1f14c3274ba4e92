"""What was found beside the paper's baselines, on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from indexcache_search.engines.base import Evaluation
from indexcache_search.evaluator import Evaluator
from indexcache_search.line import NAMED, Line, uniform_lines
from indexcache_search.strategies.recall import Recall
from indexcache_search.strategies.shift import Shift, shift_pattern
from indexcache_search.strategies.similarity import Similarity, similarity_pattern
from indexcache_search.strategies.uniform import Uniform
from sglang_indexcache import Pattern

_RULES: dict[str, Callable[[NDArray[np.float64], int, Pattern], Pattern]] = {
    Similarity.name: similarity_pattern,
    Shift.name: lambda matrix, full_layers, native: shift_pattern(matrix[0], full_layers, native),
    Recall.name: similarity_pattern,
}


@dataclass(frozen=True)
class Row:
    """One line of the held-out comparison, and what was measured."""

    line: Line
    evaluation: Evaluation


def comparison_lines(
    strategy: str,
    patterns: Mapping[Fraction, Pattern],
    native: Pattern,
    measured: Mapping[str, NDArray[np.float64] | None],
) -> list[Line]:
    """The baseline, what was found, and what the papers would take, each as far as it is known.

    Without uniform where a retention is not 1/n or a locked layer would be `F`. `indexcache-eval` compares with uniform
    at every phase.

    Args:
        strategy: name of what found `patterns`; its own baseline is not listed twice.
        patterns: by retention.
        native: the checkpoint's own.
        measured: `similarity`, or of dense models `shift` and `recall`; see `Matrices`.
    """
    lines, others = [Line.baseline(native)], []
    for retention, pattern in patterns.items():
        lines.append(Line(NAMED, strategy, retention, pattern))
        baselines = {Uniform.name: [line for line in uniform_lines(native, retention) if line.phase == 0]}
        for name, rule in _RULES.items():
            matrix = measured.get(name)
            if matrix is not None:
                baselines[name] = [Line(NAMED, name, retention, rule(matrix, len(pattern.full_layers), native))]
        others += [line for name, items in baselines.items() if name != strategy for line in items]
    return [*lines, *others]


def compare(lines: Sequence[Line], evaluator: Evaluator) -> Iterator[Row]:
    """Evaluate one line after the other."""
    for line in lines:
        assert line.pattern is not None
        yield Row(line, evaluator.evaluations([line.pattern])[0])
