"""All patterns with as many `F` layers: the truth about a calibration set, where it can be afforded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from sglang_indexcache import Pattern


def count_patterns(native: Pattern, full_layers: int) -> int:
    """How many patterns have `full_layers` `F` layers, all where the checkpoint has one."""
    return math.comb(len(native.full_layers) - 1, full_layers - 1)


def every_pattern(native: Pattern, full_layers: int) -> Iterator[Pattern]:
    """These patterns."""
    for kept in itertools.combinations(native.full_layers[1:], full_layers - 1):
        yield Pattern.from_full_layers(len(native), [0, *kept])


def layers_to_run(patterns: list[Pattern]) -> int:
    """Layers that a walk through the tree of `patterns` runs, where those below the first difference are reused."""
    ordered = sorted(pattern.roles for pattern in patterns)
    total = len(ordered[0])
    for one, other in itertools.pairwise(ordered):
        total += next(len(one) - layer for layer in range(len(one)) if one[layer] != other[layer])
    return total
