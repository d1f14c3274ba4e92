"""Keys of a config.json: those that an architecture's code reads, and those that must not stand there."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_indexcache.errors import ModelConfigError
from sglang_indexcache.model.rope import PARAMETERS, ROPE_KEYS, rope_parameters

# These keys change nothing of what a model computes for given weights: a copy that another program quantised, converted
# or saved again is the same model.
INCIDENTAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _flash_attn_2_enabled
    _name_or_path architectures attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map
    aux_loss_alpha bos_token_id chunk_size_feed_forward classifier_dropout compression_config decoder_start_token_id
    dtype embd_pdrop embedding_dropout eos_token_id ep_size expert_dtype hidden_dropout hidden_dropout_prob id2label
    index_share_for_mtp_iteration indexcache initializer_range is_encoder_decoder label2id layerdrop model_type
    num_nextn_predict_layers output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp
    problem_type quantization_config resid_pdrop return_dict router_aux_loss_coef router_jitter_noise sep_token_id
    seq_aux torch_dtype transformers_version use_cache use_flash_attention use_flash_attention_2 use_flash_attn
    """.split()
)
_WORDS = re.compile(  # words in names of keys that are about attention, or about its inputs
    r"att(?:entio)?n|window|rope|rotary|position|chunk|sink|soft_?cap|alibi|causal|sliding|spars|mask|head|norm|bias"
    r"|scal|multiplier|index|layer|block|hybrid|emb|nope|dilat|stride|recurr|linear|local|global|pool|compress|latent"
    r"|shar|loop|cross|bidirection|segment"
    r"|(?:^|[_.])(?:k|q|v|kv|qk|qkv|key|keys|query|queries|values?|swa|mla|gqa|mqa|csa|dsa|nsa|moba|topk)(?:[_.]|$)"
)
# Likewise, for pattern files whose `config_sha256` is of config.json itself.
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
        return frozenset((*self.defaults, *self.aliases, *self.only, *self.read_elsewhere, *ROPE_KEYS, *INCIDENTAL))

    def facts(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return what `config` says beyond the defaults, in one form however it was saved; rotary keys are left out.

        No code of this architecture reads a key that is on no list, so it may stand there. If its name is about
        attention or its inputs, it must be switched off.

        Args:
            config: content of a config.json.
            name: name of the model, for people.

        Raises:
            ModelConfigError: naming a key that has a value of another kind, or would make attention something else than
                what patterns were made for.
        """
        where = f"{name}: config.json"
        if config.get("model_type") not in (None, self.model_type):
            raise ModelConfigError(f"{where}: model_type is {config['model_type']!r}, expected {self.model_type!r}")
        self.check_only(config, where)
        check_unknown(config, self.known, where)
        found: dict[str, Any] = {}
        for key, default in self.defaults.items():
            names = (key, *(alias for alias, meant in self.aliases.items() if meant == key))
            value = next((config[item] for item in names if config.get(item) is not None), default)
            if not _is_kind_of(value, default):
                raise ModelConfigError(f"{where}: {key} is {_short(value)}, expected {_kind_of(default)}")
            found[key] = value
        return {key: _plain(value) for key, value in found.items() if value != self.defaults[key]}

    def check_only(self, config: Mapping[str, Any], where: str) -> None:
        """Refuse keys of `only` that have another value.

        Raises:
            ModelConfigError: naming the key.
        """
        for key, right in self.only.items():
            if config.get(key) not in (None, right):
                raise ModelConfigError(f"{where}: {key} is {_short(config[key])}, expected {right!r}")


def check_unknown(config: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse keys outside `known` that are about attention, unless they are switched off.

    Raises:
        ModelConfigError: naming the key.
    """
    for key, value in config.items():
        if key not in known and not _is_off(value) and any(_WORDS.search(word.lower()) for word in _names(key, value)):
            raise ModelConfigError(
                f"{where}: {key} is {_short(value)}, which may change attention and is not known here; expected a model"
                " without it"
            )


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
