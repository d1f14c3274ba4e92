"""Odd overrides of which layers share, and a slow definition of what runs: an object, then one question a layer.

The definition follows what Python does: an engine that reads a wrong value raises, and then nothing is served. It was
written from the sources that `extras/launch/indexcache_launch/rules.py` names, one function a version.
"""

from __future__ import annotations

import json
from random import Random
from types import SimpleNamespace
from typing import Any

from indexcache_launch.rules import GLM, HY_V4

V32 = "DeepseekV32ForCausalLM"
TYPES, PATTERN, FREQ, OFFSET, CLI = (
    "indexer_types",
    "index_topk_pattern",
    "index_topk_freq",
    "index_skip_topk_offset",
    "cli_factor",
)
LAYERS = 8
VERSIONS = (
    *("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1"),
    *("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
NEWEST = VERSIONS[-1]


def number(version: str) -> int:
    """The third number of a version."""
    return int(version.split(".")[2])


def slow(version: str, architecture: str, config: dict[str, Any], overrides: dict[str, Any]) -> str | None:
    """The roles that a version of SGLang runs; `None` where it raises."""
    try:
        made = made_of(version, architecture, config)
        for key, value in overrides.items():
            if architecture == GLM and key == TYPES:
                listed(value)
            setattr(made, key, value)
        return "".join("S" if skips(version, made, layer) else "F" for layer in range(config["num_hidden_layers"]))
    except (TypeError, KeyError, IndexError, ZeroDivisionError, AssertionError):
        return None


def made_of(version: str, architecture: str, config: dict[str, Any]) -> SimpleNamespace:
    """The object that the configuration class makes of config.json."""
    made, layers = SimpleNamespace(**config), config["num_hidden_layers"]
    if architecture == HY_V4:
        if config.get(TYPES) is None:
            made.indexer_types = ["shared" if layer % 4 != 1 and layer else "full" for layer in range(layers)]
        assert len(made.indexer_types) == layers and made.indexer_types[0] == "full"
        assert set(made.indexer_types) <= {"full", "shared"}
    if architecture == GLM and config.get(TYPES) is None:
        fill_glm(version, made, config)
    if architecture == GLM:
        listed(made.indexer_types)
    return made


def fill_glm(version: str, made: SimpleNamespace, config: dict[str, Any]) -> None:
    """What transformers fills in for GLM-5: 5.6 and 5.8 up to SGLang 0.5.14, then 5.12 and 5.19."""
    pattern, freq, offset = config.get(PATTERN), config.get(FREQ, 1), config.get(OFFSET, 2)
    if number(version) < 15:
        offset = 2
        for key in (PATTERN, FREQ):
            made.__dict__.pop(key, None)
        if number(version) >= 13 and FREQ in config:
            made.index_topk_freq = config[FREQ]
    elif pattern is None:
        freq = max(freq, 1)
    if pattern is None:
        made.indexer_types = [
            "shared" if max(layer - offset + 1, 0) % freq else "full" for layer in range(config["num_hidden_layers"])
        ]
    elif isinstance(pattern, str):
        made.indexer_types = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    else:
        made.indexer_types = list(pattern)


def listed(value: Any) -> None:
    """Raise for what is neither null nor a list of words."""
    if value is not None and not (type(value) is list and all(type(item) is str for item in value)):
        raise TypeError


def skips(version: str, made: SimpleNamespace, layer: int) -> bool:
    """Whether a layer is shared."""
    has, third = made.__dict__, number(version)
    if third >= 20 and has.get(TYPES) is not None:
        return layer < len(has[TYPES]) and has[TYPES][layer] == "shared"
    if third >= 16:
        factor = has.get(CLI, 1)
        if third >= 18:
            factor = 1 if factor is None else factor
            assert factor > 0
        if factor > 1:
            return layer % factor != 0
    pattern, freq, offset = has.get(PATTERN), has.get(FREQ, 1), has.get(OFFSET)
    if pattern is not None:
        return (third < 14 or layer < len(pattern)) and pattern[layer] == "S"
    if third >= 14:
        freq = 1 if freq is None else freq
        assert freq > 0
    if third >= 13 and offset is not None:
        assert offset > 0
    else:
        offset = 2
    return max(layer - offset + 1, 0) % freq != 0


def letters(rng: Random, layers: int = LAYERS) -> str:
    """Roles that begin with F."""
    return "F" + "".join(rng.choice("FS") for _ in range(layers - 1))


def odd_value(rng: Random, key: str) -> Any:
    """A value of a sharing key as people write it: right, too short or long, lower-case, a list, folded, null, odd."""
    roles = letters(rng, rng.choice((LAYERS, LAYERS, LAYERS, LAYERS + 1, LAYERS + 3, 3, 1)))
    words = [{"F": "full", "S": "shared"}[role] for role in roles]
    if key == TYPES:
        odd = [
            list(roles),
            roles,
            [word.upper() for word in words],
            [1, 0],
            [],
            None,
            7,
            ["full", None],
            ",".join(words),
        ]
        return words if rng.random() < 0.5 else rng.choice(odd)
    if key == PATTERN:
        odd = [
            *(
                roles.lower(),
                ",".join(roles),
                " ".join(roles),
                roles + "\n",
                "",
                "S" + roles[1:],
                roles[0] + "X" + roles,
            ),
            *(list(roles), words, [role == "F" for role in roles], None, 7, True, "auto"),
        ]
        return roles if rng.random() < 0.4 else rng.choice(odd)
    return rng.choice((1, 2, 3, 4, 4, 8, 100, None, 0, -1, "4", 2.0, True, False, [4]))


def odd_keys(rng: Random) -> dict[str, Any]:
    """Some of the sharing keys."""
    keys = rng.sample((TYPES, PATTERN, FREQ, OFFSET, CLI), rng.choice((0, 1, 1, 1, 2, 2, 3)))
    return {key: odd_value(rng, key) for key in keys}


def odd_config(rng: Random, architecture: str) -> dict[str, Any]:
    """The sharing keys of a config.json: mostly none, or as GLM-5.2 has them."""
    base = {"architectures": [architecture], "num_hidden_layers": LAYERS}
    if architecture == HY_V4:
        return base
    kind = rng.random()
    if kind < 0.5:
        return base
    if kind < 0.75:
        types = ["full" if layer < 3 or (layer - 2) % 4 == 0 else "shared" for layer in range(LAYERS)]
        return base | {FREQ: 4, OFFSET: 3, PATTERN: None} | ({TYPES: types} if rng.random() < 0.5 else {})
    return base | {key: value for key, value in odd_keys(rng).items() if key != CLI}


def case(seed: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """An architecture, a config.json and an override, by seed."""
    rng = Random(seed)
    architecture = rng.choice((GLM, GLM, V32, HY_V4))
    config, overrides = odd_config(rng, architecture), odd_keys(rng)
    return architecture, json.loads(json.dumps(config)), json.loads(json.dumps(overrides))
