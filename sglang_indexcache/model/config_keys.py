"""Keys of a config.json: those that an architecture's code reads, and those that must not stand there."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.model.incidental import INCIDENTAL, is_incidental
from sglang_indexcache.model.rope import PARAMETERS, ROPE_KEYS, rope_parameters

_WORDS = re.compile(  # words in names of keys that are about attention, or about its inputs
    r"att(?:entio)?n|window|rope|rotary|position|chunk|sink|soft_?cap|alibi|causal|sliding|spars|mask|head|norm|bias"
    r"|scal|multiplier|index|layer|block|hybrid|emb|nope|dilat|stride|recurr|linear|local|global|pool|compress|latent"
    r"|shar|loop|cross|bidirection|segment"
    r"|(?:^|[_.])(?:k|q|v|kv|qk|qkv|key|keys|query|queries|values?|swa|mla|gqa|mqa|csa|dsa|nsa|moba|topk)(?:[_.]|$)"
)
# Keys whose absence is not the same as being switched off.
_ONLY_EVERYWHERE: Mapping[str, Any] = {"is_causal": True}  # transformers' masks of any model, when it is false
# Other programs' words for keys, which no code of these architectures reads: harmless where they say the same.
_OTHER_WORDS = {
    **dict.fromkeys(("num_layers", "n_layers", "n_layer"), "num_hidden_layers"),
    **dict.fromkeys(("num_heads", "n_heads", "n_head"), "num_attention_heads"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads"), "num_key_value_heads"),
    "n_embd": "hidden_size",
}
# Left out of the digest of config.json itself, in pattern files that have no `config`.
_OLD_INCIDENTAL = frozenset(
    "_name_or_path auto_map dtype quantization_config torch_dtype transformers_version use_cache".split()
)


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """The keys of a config.json that the code of one architecture reads.

    Attributes:
        model_type: the name by which transformers builds such a model.
        defaults: keys that change what the model computes, with the values that their absence means.
        aliases: other names that some of these have.
        only: keys that may have one value alone, which their absence means.
        read_elsewhere: keys that the family reads itself.
    """

    model_type: str
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    read_elsewhere: Collection[str] = ()

    @property
    def known(self) -> frozenset[str]:
        """All keys that may stand in a config.json, with any value."""
        own = (*self.defaults, *self.aliases, *self.only, *self.read_elsewhere)
        return frozenset((*own, *_ONLY_EVERYWHERE, *ROPE_KEYS, *INCIDENTAL))

    def facts(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return what `config` says beyond the defaults, in one form however it was saved; rotary keys are left out.

        No code of this architecture reads a key that is on no list, so it may stand there. If its name is about
        attention or its inputs, it must be switched off.

        Raises:
            ModelConfigError: naming a key that has a value of another kind, or would make attention something else than
                what patterns were made for.
        """
        where = f"{name}: config.json"
        if config.get("model_type") not in (None, self.model_type):
            raise ModelConfigError(f"{where}: model_type is {config['model_type']!r}, expected {self.model_type!r}")
        self.check_only(config, where)
        found: dict[str, Any] = {}
        for key, default in self.defaults.items():
            value = self._given(config, key, where)
            value = default if value is None else value
            if not _is_kind_of(value, default):
                raise ModelConfigError(f"{where}: {key} is {_short(value)}, expected {_kind_of(default)}")
            found[key] = value
        check_unknown(config, self.known | _same_in_other_words(config, found, where), where)
        return {key: _plain(value) for key, value in found.items() if value != self.defaults[key]}

    def _given(self, config: Mapping[str, Any], key: str, where: str) -> Any:
        """Return what `config` gives for a key or one of its aliases; `None` if nothing.

        Raises:
            ModelConfigError: if two of them differ, since engines take one or the other.
        """
        names = [key, *(alias for alias, meant in self.aliases.items() if meant == key)]
        names = [item for item in names if config.get(item) is not None]
        other = next((item for item in names[1:] if config[item] != config[names[0]]), None)
        if other is not None:
            raise ModelConfigError(
                f"{where}: {names[0]} is {_short(config[names[0]])} and {other} is {_short(config[other])}, which are"
                " one and the same; expected one value"
            )
        return config[names[0]] if names else None

    def check_only(self, config: Mapping[str, Any], where: str) -> None:
        """Refuse keys of `only` that have another value.

        Raises:
            ModelConfigError: naming the key.
        """
        for key, right in {**_ONLY_EVERYWHERE, **self.only}.items():
            if config.get(key) not in (None, right):
                raise ModelConfigError(f"{where}: {key} is {_short(config[key])}, expected {right!r}")


def check_unknown(config: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse keys outside `known` that are about attention, unless they are switched off.

    Raises:
        ModelConfigError: naming the key.
    """
    for key, value in config.items():
        if key in known or is_incidental(key) or _is_off(value):
            continue
        if any(_WORDS.search(word.lower()) for word in _names(key, value)):
            raise ModelConfigError(
                f"{where}: {key} is {_short(value)}, which may change attention and is not known here; expected a model"
                " without it"
            )


def _same_in_other_words(config: Mapping[str, Any], found: Mapping[str, Any], where: str) -> set[str]:
    """Return the keys of `config` that repeat one of `found` in another program's words.

    Raises:
        ModelConfigError: naming one that says something else: it is not known which of the two the weights have.
    """
    words = {word: key for word, key in _OTHER_WORDS.items() if not _is_off(config.get(word)) and key in found}
    for word, key in words.items():
        if config[word] != found[key]:
            raise ModelConfigError(
                f"{where}: {word} is {_short(config[word])} and {key} {_short(found[key])}, which engines read;"
                f" expected the same number, or {key} alone"
            )
    return set(words)


def identity(architecture: str, facts: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `ModelLayers` that tell one config.json from another."""
    kept = {key: value for key, value in config.items() if key not in _OLD_INCIDENTAL}
    said = {key.partition(".")[0] for key in facts}
    said |= ROPE_KEYS if "rope_parameters" in said else set()
    return {
        "config": dict(sorted(facts.items())),
        "config_sha256": facts_digest(architecture, facts),
        "earlier_sha256": _digest(kept),
        "redundant": tuple(sorted(set(kept) - said - {"architectures", "model_type"})),
    }


def facts_digest(architecture: str, facts: Mapping[str, Any]) -> str:
    """Return the sha256 of what changes the model; GLM-5, GLM-5-FP8 and a copy that transformers saved share it."""
    return _digest({"architecture": architecture, **facts})


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], own_name: str, their_name: str) -> Iterator[str]:
    """Yield the keys in which two sets of facts differ, each with both values."""
    for key in sorted({*ours, *theirs}):
        own, their = (_short(facts[key]) if key in facts else "the default" for facts in (ours, theirs))
        if own != their:
            yield f"{key} is {own} in {own_name}, {their} in {their_name}"


def rope_facts(rope: Mapping[str, Any], name: str, under: str = "rope_parameters") -> dict[str, Any]:
    """Return what rotary parameters say beyond the defaults, by dotted name.

    Raises:
        ModelConfigError: if a key is not known, or its value is neither a word nor numbers.
    """
    defaults = rope_parameters({})
    for key, value in rope.items():
        check_unknown({f"{under}.{key}": value}, [f"{under}.{item}" for item in PARAMETERS], f"{name}: config.json")
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | bool) or _is_number(item) for item in numbers):
            raise ModelConfigError(
                f"{name}: config.json: {under}.{key} is {_short(value)}, expected a number or a word"
            )
    return {f"{under}.{key}": _plain(value) for key, value in rope.items() if value != defaults.get(key)}


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_kind_of(value: Any, default: Any) -> bool:
    """Return whether `value` is of the kind of `default`: a number, a switch, a word or a list of numbers or words."""
    if isinstance(default, bool | str):
        return type(value) is type(default)
    if isinstance(default, list):
        return isinstance(value, list) and all(isinstance(item, str) or _is_number(item) for item in value)
    return _is_number(value) or (value is None and default is None)


def _kind_of(default: Any) -> str:
    kinds = ((bool, "true or false"), (str, "a word"), (list, "a list of numbers or words"))
    return next((kind for type_, kind in kinds if isinstance(default, type_)), "a number")


def _plain(value: Any) -> Any:
    """Return `value` in its one spelling: 10000.0 is 10000."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_off(value: Any) -> bool:
    """Return whether `value` switches its key off."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is None or value is False or value == 0 or value == "" or value == []


def _names(key: str, value: Any) -> Iterator[str]:
    """Yield the name of a key, and the names of all keys below it."""
    yield key
    below = [value]
    while below:
        item = below.pop()
        if isinstance(item, Mapping):
            yield from map(str, item)
            below += item.values()
        elif isinstance(item, list):
            below += item


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
