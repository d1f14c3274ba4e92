"""The paper's uniform interleaving, at any phase."""

from __future__ import annotations

from fractions import Fraction

from indexcache_search.errors import SearchError
from indexcache_search.line import PHASE, Line
from sglang_indexcache import DsaModel, Pattern
from sglang_indexcache.errors import PatternError


def uniform_pattern(model: DsaModel, retention: Fraction, phase: int = 0) -> Pattern:
    """The paper's uniform pattern at `retention`.

    Raises:
        SearchError: if the retention is not 1/n, or a locked layer would have to be `F`.
    """
    if retention.numerator != 1:
        raise SearchError(f"uniform needs retentions of the form 1/n, found {retention}")
    pattern = Pattern.uniform(model.num_layers, retention.denominator, phase)
    try:
        pattern.check_fits(model.num_layers, model.locked)
    except PatternError as error:
        raise SearchError(f"uniform {retention}: {error}") from None
    return pattern


def uniform_lines(model: DsaModel, retention: Fraction) -> list[Line]:
    """Uniform at every phase in which no locked layer would be `F`; none where the retention is not 1/n."""
    lines: list[Line] = []
    if retention.numerator != 1:
        return lines
    for phase in range(retention.denominator):
        try:
            pattern = uniform_pattern(model, retention, phase)
        except SearchError:
            continue
        lines.append(Line(PHASE, f"uniform phase {phase}", retention, pattern, phase))
    return lines
