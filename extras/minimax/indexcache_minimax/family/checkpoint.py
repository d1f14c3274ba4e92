"""Read MiniMax-M3 checkpoints: which layers choose blocks, the facts of a config.json, the tensors of an index."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from indexcache_minimax.family.keys import KEYS, SAVED, TEXT_TYPES, WHOLE, WHOLE_TYPE
from indexcache_minimax.family.schedule import choosing
from sglang_indexcache.families.base import CheckpointReader
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.model.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.model.layers import ModelLayers, layer_count
from sglang_indexcache.model.rope import rope_parameters
from sglang_indexcache.pattern import Pattern

_THETA = 5000000
_ACTIVATIONS = (None, "swigluoai", "silu")  # transformers writes the second, and computes the first
_SHARING_KEYS = ("index_topk_pattern", "index_topk_freq", "use_index_cache", "indexer_types")


class MinimaxM3Checkpoint(CheckpointReader):
    """A reader of checkpoints whose layers with an index are the sites; the first three have none in the release."""

    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS
    indexer_weight = re.compile(
        r"^(?:(?!mtp|nextn|draft|vision)\w+\.)*layers\.(\d+)\.self_attn\.(?:index_q_proj|indexer\.q_proj)\."
    )

    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        """See `CheckpointReader.describe`; of a model that sees images, its text model is described."""
        text = _text(config, name, architecture)
        for part in (config, text):
            for key in _SHARING_KEYS:
                if part.get(key):
                    raise ModelConfigError(
                        f"{name}: config.json: {key} is {str(part[key])[:60]!r}, which SGLang does not read on"
                        " MiniMax-M3; expected the pattern file alone"
                    )
        if text.get("hidden_act") not in _ACTIVATIONS:
            raise ModelConfigError(f"{name}: config.json: hidden_act is {text['hidden_act']!r}, expected swigluoai")
        missing = next((key for key in self.keys[architecture].only if key not in text), None)
        if missing is not None and architecture != SAVED:
            raise ModelConfigError(
                f"{name}: config.json: {missing} is missing, without which SGLang builds another model; expected"
                f" {self.keys[architecture].only[missing]!r}"
            )
        num_layers = layer_count(text, name)
        chooses = choosing(text, name, num_layers)
        facts = {**self.keys[architecture].facts(text, name), **chooses.facts(), **_rotary(text, name)}
        shared = text.get("shared_intermediate_size")
        if shared not in (None, text.get("intermediate_size", 3072)):
            raise ModelConfigError(
                f"{name}: config.json: shared_intermediate_size is {shared!r}, expected intermediate_size, which SGLang"
                " reads"
            )
        return ModelLayers(
            name=name,
            architecture=architecture,
            layers=chooses.layers,
            index_topk=chooses.tokens,
            first_sparse_position=chooses.tokens,
            native=Pattern.full(len(chooses.layers)),
            **identity(architecture, facts, text),
        )


def _text(config: Mapping[str, Any], name: str, architecture: str) -> Mapping[str, Any]:
    """Return the part about the text model, without its `model_type`, which has several names.

    Raises:
        ModelConfigError: if there is none, or it is of another model.
    """
    inner = config.get("text_config")
    if architecture == WHOLE:
        if config.get("model_type") not in (None, WHOLE_TYPE):
            raise ModelConfigError(
                f"{name}: config.json: model_type is {config['model_type']!r}, expected {WHOLE_TYPE!r}"
            )
        if not isinstance(inner, Mapping):
            raise ModelConfigError(f"{name}: config.json: text_config is {str(inner)[:60]}, expected the text model")
        text = inner
    elif inner is not None:
        raise ModelConfigError(f"{name}: config.json: text_config is of {WHOLE}, and architectures has {architecture}")
    else:
        text = config
    if text.get("model_type") not in TEXT_TYPES:
        kinds = ", ".join(map(str, TEXT_TYPES[1:]))
        raise ModelConfigError(f"{name}: config.json: model_type is {text['model_type']!r}, expected one of {kinds}")
    return {key: value for key, value in text.items() if key != "model_type"}


def _rotary(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the rotary parameters beyond this model's defaults, wherever they stand."""
    rope = rope_parameters({"rope_theta": _THETA, **text}, name)
    dim = text.get("head_dim", 128)
    share, width = rope.get("partial_rotary_factor", 1.0), text.get("rotary_dim", dim)
    try:
        agree = int(dim * share) == width
    except TypeError:
        agree = False
    if not agree:
        raise ModelConfigError(
            f"{name}: config.json: rotary_dim is {width!r}, which SGLang reads, and partial_rotary_factor {share!r} of"
            f" {dim!r}, which transformers reads; expected the same number"
        )
    return rope_facts(rope, name)
