"""Read checkpoints of dense models: heads and layers that fit, the facts of a config.json, the tensors of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from indexcache_dense.family.keys import KEYS
from indexcache_dense.selection import DEFAULT
from sglang_indexcache.families.base import CheckpointReader
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.model.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.model.layers import ModelLayers, layer_count, positive
from sglang_indexcache.model.rope import rope_parameters
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern.selection import PatternSelection

_FULL_ATTENTION = "full_attention"
_DEFAULT_WINDOW, _DEFAULT_BELOW = 4096, 28  # layers below the second see everything
_SWITCHED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_BY_LAYER = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


class DenseGqaCheckpoint(CheckpointReader):
    """A reader of checkpoints in which every layer is a site."""

    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS
    indexer_weight = re.compile(
        r"^(?:(?!mtp|nextn|draft)\w+\.)*layers\.(\d+)\.self_attn\.(?:q_proj|qkv_proj)\.\w*weight"
    )

    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        """See `CheckpointReader.describe`."""
        num_layers = layer_count(config, name)
        _check_windows(config, name, num_layers, architecture)
        heads = positive(config, "num_attention_heads", name)
        groups = heads if config.get("num_key_value_heads") is None else positive(config, "num_key_value_heads", name)
        if heads % groups:
            raise ModelConfigError(f"{name}: config.json: {heads} heads share {groups} key heads, expected a divisor")
        return ModelLayers(
            name=name,
            architecture=architecture,
            layers=tuple(range(num_layers)),
            index_topk=DEFAULT.tokens,
            first_sparse_position=DEFAULT.tokens,
            native=Pattern.full(num_layers, selection=DEFAULT),
            **identity(architecture, self._facts(config, name, architecture), config),
        )

    def _facts(self, config: Mapping[str, Any], name: str, architecture: str) -> dict[str, Any]:
        """Collect the facts that change the model; sizes that follow from others are written out."""
        keys = self.keys[architecture]
        facts = keys.facts(config, name)
        sizes = {**keys.defaults, **facts}
        if sizes["num_key_value_heads"] is None:
            facts["num_key_value_heads"] = sizes["num_attention_heads"]
        if sizes["head_dim"] is None:
            facts["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        lengths = {"max_position_embeddings": sizes["max_position_embeddings"]}
        return {**facts, **rope_facts(rope_parameters({**lengths, **config}, name), name)}

    def selecting(self, model: ModelLayers, selection: PatternSelection | None) -> ModelLayers:
        """See `CheckpointReader.selecting`; `None` is the paper's selection."""
        return super().selecting(model, selection or DEFAULT)


def _check_windows(config: Mapping[str, Any], name: str, num_layers: int, architecture: str) -> None:
    """Check that no layer sees a sliding window, as transformers reads a config.json."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {_FULL_ATTENTION}):
        other = next((kind for kind in kinds if kind != _FULL_ATTENTION), "none") if isinstance(kinds, list) else kinds
        raise ModelConfigError(f"{name}: config.json: layer_types has {other!r}, expected {_FULL_ATTENTION} alone")
    default = _DEFAULT_WINDOW if architecture in (*_SWITCHED, "MistralForCausalLM") else None
    window = config.get("sliding_window", default)
    if not window or (architecture in _SWITCHED and not config.get("use_sliding_window")):
        return
    if architecture in _BY_LAYER:
        below = config.get("max_window_layers", _DEFAULT_BELOW)
        if kinds is not None or (isinstance(below, int) and below >= num_layers):
            return
    given = f"{window!r}" if "sliding_window" in config else f"not there, which transformers takes for {window}"
    raise ModelConfigError(f"{name}: config.json: sliding_window is {given}, expected layers that see all")
