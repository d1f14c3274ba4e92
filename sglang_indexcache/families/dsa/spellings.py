"""The spellings of a pattern in the configuration of engines, read and written exactly.

| engine                  | keys, in the order in which they win                                                  |
|-------------------------|---------------------------------------------------------------------------------------|
| SGLang 0.5.11 to 0.5.18 | `index_topk_pattern`, `index_topk_freq` with `index_skip_topk_offset`                 |
| SGLang 0.5.20 to 0.5.23 | `indexer_types`, `cli_factor` (LongCat), then as above                                |
| transformers, GLM-5     | `indexer_types`, `index_topk_pattern`, `index_topk_freq` with `index_skip_topk_offset` |
| vLLM                    | `index_topk_pattern`, `index_topk_freq` with offset; before 0.33 with `use_index_cache` |

`index_topk_freq` is NOT the paper's uniform interleaving: freq 4 means `FFSSSFSSSF...`, the paper's 1/4 is
`FSSSFSSSF...`. Read: sglang/srt/configs/model_config.py `dsa_layer_skips_topk` of 0.5.17 and 0.5.23;
transformers 5.23 configuration_glm_moe_dsa.py; vLLM docs/features/index_cache.md and PR 37735.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_indexcache.errors import PatternError, SpellingError
from sglang_indexcache.pattern import FULL, SHARED, Pattern

PATTERN_KEY = "index_topk_pattern"
TYPES_KEY = "indexer_types"
FREQ_KEY = "index_topk_freq"
OFFSET_KEY = "index_skip_topk_offset"
DEFAULT_OFFSET = 2
_NO_SPELLING = "has no spelling in any engine"
_TYPE_NAMES = {FULL: "full", SHARED: "shared"}


class Rule(Enum):
    """An engine's way of reading a configuration."""

    SGLANG_PATTERN_FIRST = "SGLang 0.5.11 to 0.5.18"
    SGLANG_TYPES_FIRST = "SGLang 0.5.20 to 0.5.23"
    TRANSFORMERS_GLM = "transformers, GLM-5"
    VLLM = "vLLM"


_KEYS = {
    Rule.SGLANG_PATTERN_FIRST: (PATTERN_KEY, FREQ_KEY),
    Rule.SGLANG_TYPES_FIRST: (TYPES_KEY, PATTERN_KEY, FREQ_KEY),
    Rule.TRANSFORMERS_GLM: (TYPES_KEY, PATTERN_KEY, FREQ_KEY),
    Rule.VLLM: (PATTERN_KEY, FREQ_KEY),
}  # the winning one first


@dataclass(frozen=True)
class SpelledPattern:
    """A pattern as an engine would read it from a configuration.

    Attributes:
        pattern: the effective pattern.
        key: the key that decided, or `None` if nothing is declared and every layer is `F`.
        notes: facts that a person should know: keys that are ignored, a freq that is not the paper's uniform.
    """

    pattern: Pattern
    key: str | None
    notes: tuple[str, ...] = ()


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


def read_spelling(config: Mapping[str, Any], num_layers: int, rule: Rule) -> SpelledPattern:
    """Read the pattern that an engine with `rule` takes from `config` (a config.json, overrides merged in).

    Engines are lenient: a pattern that is too short leaves the tail `F`, other letters count as `F`. Here both are
    errors, since nobody means them. A pattern that is longer by no more than the NextN layers is cut.

    Raises:
        SpellingError: if the winning key has a wrong length, letter or type.
    """
    notes: list[str] = []
    if rule is Rule.SGLANG_TYPES_FIRST and (config.get("cli_factor") or 1) != 1:
        raise SpellingError(
            f"cli_factor is {config['cli_factor']}: LongCat's sharing is trained in and wins over patterns"
        )
    present = [key for key in _KEYS[rule] if config.get(key) is not None]
    if not present:
        return SpelledPattern(Pattern.full(num_layers), None)
    if rule is Rule.VLLM and config.get("use_index_cache") is not True:
        notes.append(
            f"{present[0]} needs use_index_cache beside it in vLLM before 0.33, which does not read it any more"
        )
    winner = present[0]
    pattern = _read_key(config, winner, num_layers)
    for key in present[1:]:
        if key == FREQ_KEY and config[key] == 1:
            continue  # says nothing: the default
        if _read_key(config, key, num_layers) != pattern:
            notes.append(f"{key} is ignored, because {winner} is set too and wins")
    if winner == FREQ_KEY and config[FREQ_KEY] > 1 and pattern != Pattern.uniform(num_layers, config[FREQ_KEY]):
        uniform = Pattern.uniform(num_layers, config[FREQ_KEY])
        notes.append(f"{FREQ_KEY}={config[FREQ_KEY]} is {pattern}, not the paper's uniform {uniform}")
    return SpelledPattern(pattern, winner, tuple(notes))


def _read_key(config: Mapping[str, Any], key: str, num_layers: int) -> Pattern:
    value = config[key]
    if key == FREQ_KEY:
        offset = config.get(OFFSET_KEY)
        return freq_pattern(num_layers, value, DEFAULT_OFFSET if offset is None else offset)
    roles = _roles_of_types(value) if key == TYPES_KEY or isinstance(value, list) else value
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


def _roles_of_types(value: Any) -> str:
    letters = {name: letter for letter, name in _TYPE_NAMES.items()}
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SpellingError(f"{TYPES_KEY} is {value!r}, expected a list of 'full' and 'shared'")
    for layer, name in enumerate(value):
        if not isinstance(name, str) or name not in letters:
            raise SpellingError(f"{TYPES_KEY} has {name!r} for layer {layer}, expected 'full' or 'shared'")
    return "".join(letters[name] for name in value)


def indexer_types(pattern: Pattern) -> list[str]:
    """Return transformers' spelling: `["full", "shared", ...]`.

    Raises:
        PatternError: as `to_vllm`.
    """
    pattern.check_plain(_NO_SPELLING)
    return [_TYPE_NAMES[role] for role in pattern.roles]


def to_sglang(pattern: Pattern) -> dict[str, Any]:
    """Return one override that every SGLang from 0.5.11 to 0.5.23 reads as `pattern`.

    Both spellings are needed: up to 0.5.18 only the letters are read; from 0.5.20 `indexer_types` is read first, and
    transformers fills it for GLM-5 before SGLang applies overrides, so letters alone have no effect there.
    """
    return {PATTERN_KEY: pattern.roles, TYPES_KEY: indexer_types(pattern), FREQ_KEY: 1}


def to_vllm(pattern: Pattern) -> dict[str, Any]:
    """Return the `--hf-overrides` that make vLLM serve `pattern`.

    Raises:
        PatternError: if a layer is to select in blocks, which no engine's configuration says.
    """
    pattern.check_plain(_NO_SPELLING)
    return {"use_index_cache": True, PATTERN_KEY: pattern.roles}
