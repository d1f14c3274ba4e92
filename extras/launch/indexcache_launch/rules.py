"""The rules by which versions of engines read sharing keys on DSA models: leniently, and each in its own way.

`families.dsa.override` reads what somebody means; this module what runs. It imitates two steps of each engine: its
configuration class makes an object of config.json, and may fill keys in or drop them; then overrides are set on that
object, one after the other, and a function decides layer by layer.

Read: sglang/srt/configs/model_config.py `dsa_layer_skips_topk` (0.5.14 and newer), the same within
srt/models/deepseek_v2.py (before), srt/utils/hf_transformers/config.py `get_config` and srt/configs/hy_v4.py of all 16
versions; transformers/models/glm_moe_dsa/configuration_glm_moe_dsa.py of 5.6.0, 5.8.1, 5.12.1 and 5.19.0, which they
pin; vLLM 0.33.0 models/deepseek_v32/attention.py, model_executor/models/deepseek_v2.py,
models/hy_v4/nvidia/attention.py and transformers_utils/configs/hy_v4.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from indexcache_launch.reading import CONFIG, FILLED, OVERRIDE, SGLANG, Reading, merged, named
from sglang_indexcache.families.dsa.override import (
    CLI_KEY,
    DEFAULT_OFFSET,
    FREQ_KEY,
    OFFSET_KEY,
    PATTERN_KEY,
    SHARING_KEYS,
    TYPES_KEY,
    meanings,
)
from sglang_indexcache.families.hy_v4 import FREQ
from sglang_indexcache.io.errors import SpellingError
from sglang_indexcache.pattern import FULL, SHARED
from sglang_indexcache.sglang.override_flag import PARTS

GLM, HY_V4 = "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"
DEPTH_KEY = "num_hidden_layers"
_FULL_WORD, _SHARED_WORD = "full", "shared"


class _Refused(Exception):  # noqa: N818  (what an engine does, no error of ours)
    """An engine's error on a configuration, in our words."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule by which some versions of an engine read a configuration.

    Attributes:
        engine: its name.
        versions: those that do so.
        order: the keys that can decide, the winning one first.
        unread: keys that it has no word for.
        null: numbers for which null is as if the key was not there; for others it is an error.
        positive: numbers that are refused below 1; others are calculated with.
        needs_all: whether a pattern that is too short is an error, rather than F from there on.
        checks_types: whether `indexer_types` of another length or with other words are an error, and freqs like 2.0.
        glm_drops: keys that the configuration class of GLM-5 takes out when it fills `indexer_types` in.
        glm_reads_offset: whether that class reads `index_skip_topk_offset`, and takes a freq below 1 for 1.
    """

    engine: str = SGLANG
    versions: tuple[str, ...]
    order: tuple[str, ...]
    unread: tuple[str, ...] = ()
    null: tuple[str, ...] = (FREQ_KEY, OFFSET_KEY)
    positive: tuple[str, ...] = (FREQ_KEY, OFFSET_KEY)
    needs_all: bool = False
    checks_types: bool = False
    glm_drops: tuple[str, ...] = ()
    glm_reads_offset: bool = True

    @property
    def name(self) -> str:
        """The engine and its versions."""
        return named(self.engine, self.versions)


_PLAIN, _CLI, _NUMBERS = (PATTERN_KEY, FREQ_KEY), (CLI_KEY, PATTERN_KEY, FREQ_KEY), (FREQ_KEY, OFFSET_KEY, CLI_KEY)
SGLANG_RULES = (
    Rule(
        versions=("0.5.11", "0.5.12", "0.5.12.post1"),
        order=_PLAIN,
        unread=(TYPES_KEY, CLI_KEY, OFFSET_KEY),
        null=(),
        positive=(),
        needs_all=True,
        glm_drops=(PATTERN_KEY, FREQ_KEY),
        glm_reads_offset=False,
    ),
    Rule(
        versions=("0.5.13", "0.5.13.post1"),
        order=_PLAIN,
        unread=(TYPES_KEY, CLI_KEY),
        null=(OFFSET_KEY,),
        positive=(OFFSET_KEY,),
        needs_all=True,
        glm_drops=(PATTERN_KEY,),  # SGLang puts the freq back
        glm_reads_offset=False,
    ),
    Rule(
        versions=("0.5.14",),
        order=_PLAIN,
        unread=(TYPES_KEY, CLI_KEY),
        glm_drops=(PATTERN_KEY,),
        glm_reads_offset=False,
    ),
    Rule(versions=("0.5.15", "0.5.15.post1"), order=_PLAIN, unread=(TYPES_KEY, CLI_KEY)),
    Rule(versions=("0.5.16", "0.5.17"), order=_CLI, unread=(TYPES_KEY,)),
    Rule(versions=("0.5.18", "0.5.19"), order=_CLI, unread=(TYPES_KEY,), null=_NUMBERS, positive=_NUMBERS),
    Rule(
        versions=("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
        order=(TYPES_KEY, *_CLI),
        null=_NUMBERS,
        positive=_NUMBERS,
    ),
)
SGLANG_HY_V4_RULES = SGLANG_RULES[-1:]  # earlier versions have no such model
_VLLM = Rule(engine="vLLM", versions=("0.33.0",), order=_PLAIN, unread=(TYPES_KEY, CLI_KEY), null=(), positive=())
VLLM_RULES = (_VLLM,)  # of DeepSeek-V3.2 and GLM-5
VLLM_HY_V4_RULES = (
    replace(_VLLM, order=(TYPES_KEY, *_PLAIN), unread=(CLI_KEY,), positive=(FREQ_KEY,), checks_types=True),
)


def readings(architecture: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[Reading, ...]:
    """Say which layers versions of engines would run with overrides alone.

    Args:
        architecture: the one that config.json names.
        config: content of config.json.
        overrides: a user's, without what `SglangAdapter.to_overrides` adds.
    """
    hy_v4 = (*SGLANG_HY_V4_RULES, *VLLM_HY_V4_RULES)
    rules = hy_v4 if architecture == HY_V4 else (*SGLANG_RULES, *VLLM_RULES)
    return merged(read(rule, architecture, config, overrides) for rule in rules)


def read(rule: Rule, architecture: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Reading:
    """Say which layers an engine would run of a config.json with `overrides` alone.

    Args:
        rule: the engine's.
        architecture: the one that config.json names.
        config: content of config.json.
        overrides: SGLang's `--json-model-override-args`, or vLLM's `--hf-overrides`.
    """
    made = partial(Reading, engine=rule.engine, versions=rule.versions)
    try:
        key, roles = _run(rule, architecture, config, overrides)
    except _Refused as error:
        return made(roles=None, key=None, source=None, ignored=(), line=f"{rule.name} refuses it: {error}")
    keys = (FREQ_KEY, *(() if OFFSET_KEY in rule.unread else (OFFSET_KEY,))) if key == FREQ_KEY else (key,)
    said = (where for where, given in ((OVERRIDE, overrides), (CONFIG, config)) if _says(given, keys))
    source = None if key is None else next(said, FILLED)
    given = (name for name in (*SHARING_KEYS, CLI_KEY) if overrides.get(name) is not None and name not in keys)
    ignored = tuple(name for name in given if not _agrees(overrides, name, roles))
    kept = [layer for layer, role in enumerate(roles) if role == FULL]
    what = f"all {len(roles)} layers" if len(kept) == len(roles) else f"{len(kept)} of {len(roles)} layers"
    if source == OVERRIDE:
        line = f"{rule.name} runs {what} F by {key}" + (f", and ignores {_listed(ignored)}" if ignored else "")
    elif ignored:
        why = _why(rule, ignored, key, source)
        line = f"{rule.name} ignores {_listed(ignored)} on {architecture} ({why}): {what} stay F"
    else:
        line = f"{rule.name}: {what} stay F"
    if roles[0] == SHARED:
        line += "; layer 0 has nothing to reuse, so the first long prompt ends the server"
    return made(roles=roles, key=key, source=source, ignored=ignored, line=line)


def _agrees(overrides: Mapping[str, Any], key: str, roles: str) -> bool:
    """Return whether a key of overrides that does not decide says the same, or nothing."""
    names = (FREQ_KEY, OFFSET_KEY) if key in (FREQ_KEY, OFFSET_KEY) else (key,)
    given = {name: overrides[name] for name in names if name in overrides}
    if given == {FREQ_KEY: 1}:
        return True
    try:
        return any(pattern.roles == roles for pattern in meanings(given, len(roles)).values())
    except SpellingError:
        return False


def _why(rule: Rule, ignored: tuple[str, ...], key: str | None, source: str | None) -> str:
    if set(ignored) <= set(rule.unread):
        return f"it does not read {'it' if len(ignored) == 1 else 'them'}"
    if key is None:
        return f"it does nothing without {FREQ_KEY}"
    where = "config.json has" if source == CONFIG else "its configuration class fills in"
    return f"it reads {key} first, which {where}"


def _run(
    rule: Rule, architecture: str, config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[str | None, str]:
    """Return the key that decides and the roles; raise `_Refused` where the engine raises."""
    nested = next((key for key in PARTS if isinstance(overrides.get(key), Mapping)), None)
    if nested is not None:
        raise _Refused(f"{architecture} has no {nested}")
    if architecture == GLM:
        _check_words(TYPES_KEY, overrides.get(TYPES_KEY))
    made = {**_made(rule, architecture, config), **overrides}
    layers = made.get(DEPTH_KEY)
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise _refused(DEPTH_KEY, layers)
    for key in rule.order:
        value = made.get(key)
        if key == CLI_KEY:
            factor = _number(rule, made, key, 1)
            if factor > 1:
                return key, "".join(SHARED if layer % factor else FULL for layer in range(layers))
        elif key == FREQ_KEY:
            freq = _number(rule, made, FREQ_KEY, 1)
            offset = DEFAULT_OFFSET if OFFSET_KEY in rule.unread else _number(rule, made, OFFSET_KEY, DEFAULT_OFFSET)
            return None if made.get(key) is None else key, _by_freq(freq, offset, layers)
        elif value is not None:
            return key, _by_entry(rule, key, value, layers)
    raise AssertionError(rule.order)


def _made(rule: Rule, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the object that the engine makes of config.json, before overrides."""
    made, given, layers = dict(config), config.get(TYPES_KEY), int(config[DEPTH_KEY])
    if architecture == HY_V4:
        if given is None:
            made[TYPES_KEY] = _words(_by_freq(FREQ, DEFAULT_OFFSET, layers))
        elif not isinstance(given, list) or len(given) != layers or given[0] != "full" or not _only_words(given):
            raise _refused(f"config.json: {TYPES_KEY}", given)
    elif architecture == GLM and given is not None:
        _check_words(f"config.json: {TYPES_KEY}", given)
    elif architecture == GLM:
        pattern = config.get(PATTERN_KEY)
        if pattern is None:
            names = (FREQ_KEY, OFFSET_KEY) if rule.glm_reads_offset else (FREQ_KEY,)
            numbers = {name: _checked(f"config.json: {name}", config[name]) for name in names if name in config}
            freq = numbers.get(FREQ_KEY, 1)
            freq = max(freq, 1) if rule.glm_reads_offset else freq
            made[TYPES_KEY] = _words(_by_freq(freq, numbers.get(OFFSET_KEY, DEFAULT_OFFSET), layers))
        elif isinstance(pattern, str) and not set(pattern) - {FULL, SHARED}:
            made[TYPES_KEY] = _words(pattern)
        elif isinstance(pattern, list):
            _check_words(f"config.json: {PATTERN_KEY}", pattern)
            made[TYPES_KEY] = pattern
        else:
            raise _refused(f"config.json: {PATTERN_KEY}", pattern)
        for key in rule.glm_drops:
            made.pop(key, None)
    return made


def _by_entry(rule: Rule, key: str, value: Any, layers: int) -> str:
    """Return the roles of a pattern or of types, entry by entry: what is not shared is F."""
    if not isinstance(value, str | list):
        raise _refused(key, value)
    if key == TYPES_KEY and rule.checks_types and (len(value) != layers or not _only_words(value)):
        raise _refused(key, value)
    if key == PATTERN_KEY and rule.needs_all and len(value) < layers:
        raise _Refused(f"{key} has {len(value)} entries for {layers} layers")
    word = SHARED if key == PATTERN_KEY else _SHARED_WORD
    return "".join(SHARED if layer < len(value) and value[layer] == word else FULL for layer in range(layers))


def _by_freq(freq: float, offset: float, layers: int) -> str:
    """Return the roles of a freq, whatever numbers these are."""
    if freq == 0:
        raise _Refused(f"{FREQ_KEY} is 0")
    return "".join(SHARED if max(layer - offset + 1, 0) % freq else FULL for layer in range(layers))


def _number(rule: Rule, made: Mapping[str, Any], key: str, default: int) -> float:
    value = made.get(key, default)
    if value is None and key in rule.null:
        return default
    number = _checked(key, value)
    if key in rule.positive and (number < 1 or (rule.checks_types and not isinstance(value, int))):
        raise _refused(key, value)
    return number


def _checked(key: str, value: Any) -> float:
    if not isinstance(value, int | float):  # true is 1 in Python
        raise _refused(key, value)
    return value


def _check_words(key: str, value: Any) -> None:
    """Refuse what the configuration class of GLM-5 does: it takes any words, but a list of words alone."""
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise _refused(key, value)


def _only_words(value: Any) -> bool:
    return all(item in (_FULL_WORD, _SHARED_WORD) for item in value)


def _words(roles: str) -> list[str]:
    return [_SHARED_WORD if role == SHARED else _FULL_WORD for role in roles]


def _says(given: Mapping[str, Any], keys: tuple[str | None, ...]) -> bool:
    return any(key is not None and given.get(key) is not None for key in keys)


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(", ".join(names).rsplit(", ", 1))


def _refused(key: str, value: Any) -> _Refused:
    text = json.dumps(value)
    return _Refused(f"{key} is {text if len(text) <= 60 else text[:57] + '...'}")
