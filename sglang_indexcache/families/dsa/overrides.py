"""A pattern as SGLang's `--json-model-override-args`, merged with what the user gives there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.errors import SpellingError
from sglang_indexcache.families.dsa.spellings import (
    FREQ_KEY,
    OFFSET_KEY,
    PATTERN_KEY,
    TYPES_KEY,
    Rule,
    read_spelling,
    to_sglang,
)
from sglang_indexcache.overrides import FLAG
from sglang_indexcache.pattern import Pattern

SHARING_KEYS = (PATTERN_KEY, TYPES_KEY, FREQ_KEY, OFFSET_KEY)


def merge_overrides(user: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
    """The user's overrides with `pattern` added, in every spelling that SGLang 0.5.11 to 0.5.23 reads.

    Each sharing key that the user gives is read on its own, since versions differ in which one wins.

    Raises:
        SpellingError: if one of them says another pattern, `cli_factor` would win over any, or the model would have
            another number of layers.
    """
    if user.get("num_hidden_layers", len(pattern)) != len(pattern):
        raise SpellingError(
            f"{FLAG}: num_hidden_layers is {user['num_hidden_layers']}, the pattern has {len(pattern)} letters;"
            " expected a file made for that model"
        )
    if (user.get("cli_factor") or 1) != 1:
        raise SpellingError(f"{FLAG}: cli_factor is {user['cli_factor']}, which wins over any pattern; expected none")
    for keys in ((PATTERN_KEY,), (TYPES_KEY,), (FREQ_KEY, OFFSET_KEY)):
        given = {key: user[key] for key in keys if user.get(key) is not None}
        if not given or given == {FREQ_KEY: 1}:
            continue
        try:
            meant = read_spelling(given, len(pattern), Rule.SGLANG_TYPES_FIRST).pattern
        except SpellingError as error:
            raise SpellingError(f"{FLAG}: {error}") from None
        if meant != pattern:
            raise SpellingError(
                f"{FLAG}: {next(iter(given))} means {meant}, the pattern file {pattern}; expected one of them"
            )
    return {**{key: value for key, value in user.items() if key not in SHARING_KEYS}, **to_sglang(pattern)}
