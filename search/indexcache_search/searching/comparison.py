"""Compare the patterns found with the paper's baselines, on held-out data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.results.variant import IN_BYTES, IN_TIME, NAMED, Variant, VariantLosses, uniform_lines
from indexcache_search.searching.search import Found
from indexcache_search.strategies import measured_strategies
from indexcache_search.strategies.uniform import Uniform
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import full_layer_count


def comparison_lines(
    found: Found, native: Pattern, measured: Mapping[str, NDArray[np.float64] | None]
) -> list[Variant]:
    """List the baseline, the patterns found, and those of the papers, each as far as it is known.

    Without uniform where a retention is not 1/n or a locked layer would be `F`. `indexcache-eval` compares with uniform
    at every phase.

    Args:
        found: the patterns; a baseline that is their own strategy is not listed twice.
        native: the checkpoint's own.
        measured: `similarity`, or of dense models `shift` and `recall`; see `Matrices`.
    """
    lines, others, name = [Variant.baseline(native)], list[Variant](), found.strategy.name
    for retention, pattern in found.patterns.items():
        lines.append(Variant(NAMED, name, retention, pattern))
        count = full_layer_count(len(native), retention)
        baselines = {Uniform.name: [line for line in uniform_lines(native, retention) if line.phase == 0]}
        for rule in measured_strategies(native.dense):
            matrix = measured.get(rule.name)
            if matrix is not None:
                taken = rule.pattern(matrix, count, native)
                baselines[rule.name] = [Variant(NAMED, rule.name, retention, taken)]
        others += [line for rule, items in baselines.items() if rule != name for line in items]
    if found.within_budget is not None:
        suffix = IN_BYTES if native.dense else IN_TIME
        lines.append(Variant(NAMED, f"{name}{suffix}", None, found.within_budget))
    return [*lines, *others]


def evaluated(lines: Sequence[Variant], evaluator: Evaluator) -> Iterator[VariantLosses]:
    """Evaluate one line after the other."""
    for line in lines:
        assert line.pattern is not None
        yield VariantLosses(line, evaluator.evaluations([line.pattern])[0])
