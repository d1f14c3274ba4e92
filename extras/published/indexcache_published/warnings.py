"""Warnings about patterns that fit a model and still look wrong: copied from another model, or worse than a search."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

from indexcache_published.known import KnownPattern, known_patterns
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.file import PatternFile

GREEDY = "greedy"  # the strategy whose patterns are nested: it only ever turns one more layer into S
_LEAST = 16  # letters; two models may begin with fewer equal ones by chance


def provenance(pattern: Pattern, file: PatternFile | None, architecture: str | None) -> Iterator[str]:
    """Yield a line where `pattern` is known from others, and nobody verified it here.

    Args:
        pattern: the pattern.
        file: its file, if it is of one.
        architecture: the model's, as in config.json; `None` where no model is known.
    """
    if file is not None and file.published is not None:
        yield f"the pattern was {file.published} ({file.published.source})"
        return
    for known in known_patterns():
        if pattern.plain() == known.pattern and _fits(known, pattern, architecture) is not False:
            yield f"the letters are those of {known.label}: published, not verified here"


def warnings_about(
    pattern: Pattern,
    file: PatternFile | None,
    architecture: str | None,
    is_uniform: bool = False,
    locked: Collection[int] = (),
) -> Iterator[str]:
    """Yield a line for each reason to doubt `pattern`.

    Args:
        pattern: the pattern.
        file: its file, if it is of one.
        architecture: the model's, as in config.json; `None` where no model is known.
        is_uniform: whether it was named `uniform@1/4`, which may not look evenly spaced where layers are locked.
        locked: layers of the model that can only be `S`; those of the file are added.
    """
    if file is not None:
        locked = {*locked, *file.model.locked_layers}
    for known in known_patterns():
        yield from _copied(pattern, known, architecture)
    if file is not None and file.search is not None and file.search.strategy == GREEDY:
        yield from _not_nested(file)
    if architecture is not None and (is_uniform or evenly_spaced(pattern)):
        yield from _dropped(pattern, architecture, locked)


def _fits(known: KnownPattern, pattern: Pattern, architecture: str | None) -> bool | None:
    """Return whether `known` is of this model; `None` if that is not known."""
    if len(pattern) != len(known.pattern):
        return False
    return None if architecture is None else known.is_for(architecture, len(pattern))


def _copied(pattern: Pattern, known: KnownPattern, architecture: str | None) -> Iterator[str]:
    """Warn if the letters are those, or the first of those, that are known for another model."""
    count = len(pattern)
    if count < _LEAST or pattern.dense or not known.pattern.roles.startswith(pattern.roles):
        return
    if _fits(known, pattern, architecture) is False:
        part = "all" if count == len(known.pattern) else f"the first {count}"
        yield (
            f"the {count} letters are {part} of the {len(known.pattern)} letters of {known.label}: found for the layers"
            f" of {known.file.model.architecture}; expected a search on this model"
        )


def _not_nested(file: PatternFile) -> Iterator[str]:
    """Warn if a sparser pattern of a greedy search keeps a layer that a denser one shares."""
    found = [
        *file.trajectory_patterns(),
        *(Pattern.parse(letters, file.selection) for letters in file.patterns.values()),
    ]
    if file.search is None or not file.search.within:
        found.append(file.as_pattern())
    ordered = sorted(set(found), key=lambda item: (-len(item.full_layers), item.roles))
    for denser, sparser in pairwise(ordered):
        extra = sorted({*sparser.full_layers} - {*denser.full_layers})
        if extra:
            yield (
                f"the search is called {GREEDY}, but the pattern with {len(sparser.full_layers)} {sparser.full_role}"
                f" layers keeps {_layers(extra)}, which the one with {len(denser.full_layers)} shares; expected nested"
                " patterns"
            )


def evenly_spaced(pattern: Pattern) -> bool:
    """Return whether the `F` layers stand at equal distances, whatever the first and the last are."""
    layers = pattern.full_layers
    gaps = [second - first for first, second in pairwise(layers)]
    if len(gaps) < 3 or pattern.indexers:
        return False
    step = gaps[1]
    return step > 1 and set(gaps[1:]) == {step} and gaps[0] <= step and len(pattern) - layers[-1] <= step


def _dropped(pattern: Pattern, architecture: str, locked: Collection[int]) -> Iterator[str]:
    """Warn if a uniform pattern shares layers that the known search with about as many `F` layers kept.

    A known pattern with an `F` on a locked layer is of another model: GLM-5.2 has the architecture and depth of GLM-5.
    """
    fitting = (item for item in known_patterns() if item.is_for(architecture, len(pattern)))
    known = [item for item in fitting if not {*item.pattern.full_layers} & {*locked}]
    if not known:
        return
    count = len(pattern.full_layers)
    nearest = min(known, key=lambda item: abs(len(item.pattern.full_layers) - count))
    dropped = sorted({*nearest.pattern.full_layers} - {*pattern.full_layers})
    if dropped:
        yield (
            f"the pattern is uniform and shares {_layers(dropped)}, which {nearest.label} keeps; expected a searched"
            " pattern, or a comparison of the two"
        )


def _layers(layers: list[int]) -> str:
    """Name at most eight layers."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    return f"layers {', '.join(map(str, layers[:8]))}{more}"
