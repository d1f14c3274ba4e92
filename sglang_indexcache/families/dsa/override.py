"""The spellings of a pattern in the configuration of engines: what somebody means by them, read and written exactly.

| key                                             | says                                                            |
|-------------------------------------------------|-----------------------------------------------------------------|
| `indexer_types`                                 | `["full", "shared", ...]`                                       |
| `index_topk_pattern`                            | `"FS..."`, or a list of such letters or words                   |
| `index_topk_freq` with `index_skip_topk_offset` | every so many layers an F, behind the first; offset 2 by itself |

`index_topk_freq` is NOT the paper's uniform interleaving: freq 4 means `FFSSSFSSSF...`, the paper's 1/4 is
`FSSSFSSSF...`. Which key wins, and which is read at all, differs between engines and their versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.io.errors import PatternError, SpellingError
from sglang_indexcache.pattern import FULL, SHARED, Pattern
from sglang_indexcache.sglang.override_flag import PARTS

PATTERN_KEY = "index_topk_pattern"
TYPES_KEY = "indexer_types"
FREQ_KEY = "index_topk_freq"
OFFSET_KEY = "index_skip_topk_offset"
CLI_KEY = "cli_factor"  # LongCat's
SHARING_KEYS = (TYPES_KEY, PATTERN_KEY, FREQ_KEY, OFFSET_KEY)
DEFAULT_OFFSET = 2
_NO_SPELLING = "has no spelling in any engine"
_TYPE_NAMES = {FULL: "full", SHARED: "shared"}


def freq_pattern(num_layers: int, freq: int, offset: int = DEFAULT_OFFSET) -> Pattern:
    """Return the schedule of `index_topk_freq`: layer l is `F` if max(l - offset + 1, 0) is a multiple of `freq`.

    Raises:
        SpellingError: if `freq` or `offset` is not positive (offset 0 would make layer 0 shared).
    """
    for key, value in ((FREQ_KEY, freq), (OFFSET_KEY, offset)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpellingError(f"{key} is {value!r}, expected a positive integer")
    layers = range(num_layers)
    return Pattern("".join(FULL if max(layer - offset + 1, 0) % freq == 0 else SHARED for layer in layers))


def read_spelling(config: Mapping[str, Any], num_layers: int) -> Pattern:
    """Read the pattern that `config` (a config.json, or overrides) declares; all `F` if it declares none.

    Engines are lenient: a pattern that is too short leaves the tail `F`, other letters count as `F`. Here both are
    errors, since nobody means them. A pattern that is longer by no more than the NextN layers is cut.

    Raises:
        SpellingError: if a sharing key has a wrong length, letter or type.
    """
    if (config.get(CLI_KEY) or 1) != 1:
        raise SpellingError(f"{CLI_KEY} is {config[CLI_KEY]}: LongCat's sharing is trained in and wins over patterns")
    return next(iter(by_key(config, num_layers).values()), Pattern.full(num_layers))


def meanings(overrides: Mapping[str, Any], num_layers: int) -> dict[str, Pattern]:
    """Read each sharing key of model overrides on its own, since engines differ in which one wins.

    Returns:
        What `indexer_types`, `index_topk_pattern` and `index_topk_freq` (with its offset) mean, where they are given.

    Raises:
        SpellingError: if one of them has a wrong length, letter or type, or stands where no engine reads it.
    """
    for outer in PARTS:
        inner = overrides.get(outer)
        nested = next((key for key in SHARING_KEYS if isinstance(inner, Mapping) and key in inner), None)
        if nested is not None:
            raise SpellingError(
                f"{nested} stands in {outer}, where it is not read on these models; expected it outside"
            )
    if overrides.get(OFFSET_KEY) is not None and overrides.get(FREQ_KEY) is None:
        raise SpellingError(f"{OFFSET_KEY} says nothing without {FREQ_KEY}; expected both or none")
    return by_key(overrides, num_layers)


def by_key(config: Mapping[str, Any], num_layers: int) -> dict[str, Pattern]:
    """Read the sharing keys that are given, the winning one first.

    A freq of 1 beside another key is left out, since it says nothing.

    Raises:
        SpellingError: as `read_spelling`.
    """
    given = [key for key in (TYPES_KEY, PATTERN_KEY, FREQ_KEY) if config.get(key) is not None]
    if len(given) > 1 and config.get(FREQ_KEY) == 1:
        given.remove(FREQ_KEY)
    return {key: _read_key(config, key, num_layers) for key in given}


def _read_key(config: Mapping[str, Any], key: str, num_layers: int) -> Pattern:
    value = config[key]
    if key == FREQ_KEY:
        offset = config.get(OFFSET_KEY)
        return freq_pattern(num_layers, value, DEFAULT_OFFSET if offset is None else offset)
    roles = _roles_of_list(key, value) if key == TYPES_KEY or isinstance(value, list) else value
    if isinstance(roles, str):
        roles = roles[: max(num_layers, len(roles) - _nextn_layers(config))]  # engines read no entry of those
    try:
        pattern = Pattern(roles)
        pattern.check_fits(num_layers)
    except PatternError as error:
        raise SpellingError(f"{key}: {error}") from None
    return pattern


def _nextn_layers(config: Mapping[str, Any]) -> int:
    """Return the number of NextN layers behind the last one, as far as a config.json gives it."""
    given = config.get("num_nextn_predict_layers")
    return given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else 0


def _roles_of_list(key: str, value: Any) -> str:
    """Read a list of words; one of letters, too, where a pattern may be a list."""
    letters = {name: letter for letter, name in _TYPE_NAMES.items()}
    expected = "'full' or 'shared'"
    if not isinstance(value, list):
        raise SpellingError(f"{key} is {value!r}, expected a list of 'full' and 'shared'")
    if key != TYPES_KEY and any(item in (FULL, SHARED) for item in value):
        letters, expected = {FULL: FULL, SHARED: SHARED}, "'F' or 'S'"
    for layer, name in enumerate(value):
        if not isinstance(name, str) or name not in letters:
            raise SpellingError(f"{key} has {name!r} for layer {layer}, expected {expected}")
    return "".join(letters[name] for name in value)


def indexer_types(pattern: Pattern) -> list[str]:
    """Return transformers' spelling: `["full", "shared", ...]`.

    Raises:
        PatternError: if a layer is to select in blocks, which no engine's configuration says, or the pattern is of a
            dense model.
    """
    pattern.check_plain(_NO_SPELLING)
    if pattern.dense:
        raise PatternError(f"a pattern of a dense model {_NO_SPELLING}; expected F and S of a model with indexers")
    return [_TYPE_NAMES[role] for role in pattern.roles]


def to_sglang(pattern: Pattern) -> dict[str, Any]:
    """Return one override that every SGLang from 0.5.11 to 0.5.23 reads as `pattern`.

    Both spellings are needed: up to 0.5.19 only the letters are read; from 0.5.20 on `indexer_types` is read first, and
    configuration classes fill it in for GLM-5 and HY-V4 before SGLang applies overrides, so that letters alone have no
    effect there.
    """
    return {PATTERN_KEY: pattern.roles, TYPES_KEY: indexer_types(pattern), FREQ_KEY: 1}


def to_vllm(pattern: Pattern) -> dict[str, Any]:
    """Return the `--hf-overrides` that make vLLM serve `pattern` on DeepSeek-V3.2, GLM-5 and HY-V4.

    Both spellings are needed: the first two read the letters, before 0.33 with `use_index_cache` beside them; HY-V4
    reads `indexer_types` first, which its configuration class fills in.

    Raises:
        PatternError: as `indexer_types`.
    """
    return {"use_index_cache": True, TYPES_KEY: indexer_types(pattern), PATTERN_KEY: pattern.roles}
