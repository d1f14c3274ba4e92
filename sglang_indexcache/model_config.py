"""What a DSA model's config.json says about its indexers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.errors import ModelConfigError, SpellingError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.spellings import Rule, read_spelling

ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")

MOST_LAYERS = 4096

_REFUSED = {
    "LongcatFlashForCausalLM": "LongCat's sharing (cli_factor) is trained in and wins over any pattern",
    "DeepseekV4ForCausalLM": "DeepSeek-V4 shares indices through a buffer of its own, which patterns don't reach",
}

# Not part of what the model computes: the same checkpoint quantised, converted or re-saved keeps its digest.
_INCIDENTAL_KEYS = {
    "_name_or_path",
    "auto_map",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


@dataclass(frozen=True)
class DsaModel:
    """A model with one lightning indexer per attention layer.

    Attributes:
        name: where it came from: a folder's name or a hub id.
        architecture: one of `ARCHITECTURES`.
        num_layers: DSA attention layers; NextN/MTP layers are not counted.
        index_topk: tokens that each query selects.
        native: the checkpoint's own pattern; all `F` unless it was trained with sharing.
        config_sha256: digest of config.json without incidental keys, see `config_digest`.
    """

    name: str
    architecture: str
    num_layers: int
    index_topk: int
    native: Pattern
    config_sha256: str

    @property
    def locked(self) -> tuple[int, ...]:
        """Layers shared in the checkpoint: no indexer weights, so they can't become `F`."""
        return self.native.shared_layers

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> DsaModel:
        """Read a parsed config.json.

        Raises:
            ModelConfigError: if the architecture has no known DSA attention, or a needed key is missing or wrong.
        """
        architectures = config.get("architectures") or []
        if not isinstance(architectures, list):
            raise ModelConfigError(f"{name}: config.json: architectures is {architectures!r}, expected a list")
        known = [item for item in ARCHITECTURES if item in architectures]
        if not known:
            reason = next((_REFUSED[item] for item in map(str, architectures) if item in _REFUSED), None)
            if reason is not None:
                raise ModelConfigError(f"{name}: {reason}; expected {' or '.join(ARCHITECTURES)}")
            found = ", ".join(map(str, architectures)) or config.get("model_type", "no architecture")
            raise ModelConfigError(
                f"{name}: {found} has no DSA attention known here, expected {' or '.join(ARCHITECTURES)}"
            )
        num_layers = _positive(config, "num_hidden_layers", name)
        if num_layers > MOST_LAYERS:
            raise ModelConfigError(f"{name}: config.json: {num_layers} layers, expected at most {MOST_LAYERS}")
        try:
            native = read_spelling(config, num_layers, Rule.SGLANG_TYPES_FIRST).pattern
        except SpellingError as error:
            raise ModelConfigError(f"{name}: config.json: {error}") from None
        return cls(name, known[0], num_layers, _positive(config, "index_topk", name), native, config_digest(config))


def _positive(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"{name}: config.json: {key} is {value!r}, expected a positive integer")
    return value


def config_digest(config: Mapping[str, Any]) -> str:
    """sha256 over config.json in canonical form (sorted keys, no spaces), incidental keys left out.

    GLM-5 and GLM-5-FP8 have the same digest; another index_topk, another depth or another native schedule have not.
    """
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL_KEYS}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
