"""Unique names for the patterns that a user requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from indexcache_search.errors import SearchError
from sglang_indexcache.pattern.selection import PatternSelection
from sglang_indexcache.pattern_file.file import split_retention
from sglang_indexcache.pattern_file.pattern_name import PatternSpec, split_name

_TAKEN = re.compile(r"baseline|uniform( \(paper's phase\)|, (mean of \d+ phases|best phase).*| phase \d+.*)")


def unique_names(asked: Sequence[tuple[str | None, PatternSpec, str]]) -> list[str]:
    """Return a name for each pattern: the given one, else its label if unique, else its written form.

    Args:
        asked: given names, patterns, and suffixes shown after the name.

    Raises:
        SearchError: if a given name is reserved, or two names are equal.
    """
    for given, _, _ in asked:
        if given is not None and _TAKEN.fullmatch(given):
            raise SearchError(f"--pattern: the name {given} is taken, expected another before the =")
    named = [(given or spec.label, more) for given, spec, more in asked]
    count = Counter(named)
    names = [
        name if given is not None or (count[name, more] == 1 and not _TAKEN.fullmatch(name)) else _written(spec)
        for (given, spec, more), (name, _) in zip(asked, named, strict=True)
    ]
    count = Counter((name, more) for name, (_, _, more) in zip(names, asked, strict=True))
    twice = next((key for key, number in count.items() if number > 1), None)
    if twice is not None:
        raise SearchError(f"--pattern: {''.join(twice).strip()} stands there twice, expected each pattern once, or"
                          " another NAME= before it")  # fmt: skip
    return names


def file_names(patterns: Iterable[str]) -> list[str]:
    """Return the files among patterns as written on a command line."""
    return [str(split_retention(split_name(text)[1])[0]) for text in patterns]


def _written(spec: PatternSpec) -> str:
    return spec.text if spec.file is None else str(split_retention(spec.text)[0])


def suffix(selection: PatternSelection | None, among: Iterable[PatternSelection | None]) -> str:
    """Name the fields in which `selection` differs from the others, as a suffix of a variant's name."""
    return "" if selection is None else selection.differing({item for item in among if item is not None})
