"""Read checkpoints of dense models: heads and layers that fit, the facts of a config.json, the tensors of layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from sglang_indexcache.errors import ModelConfigError
from sglang_indexcache.families.base import CheckpointReader
from sglang_indexcache.families.dense_gqa.keys import KEYS
from sglang_indexcache.families.dense_gqa.windows import check_layers
from sglang_indexcache.model.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.model.layers import ModelLayers, layer_count, positive
from sglang_indexcache.model.rope import rope_parameters
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern.selection import DEFAULT, Selection

_QUERIES = re.compile(r"^(?:(?!mtp|nextn|draft)\w+\.)*layers\.(\d+)\.self_attn\.(?:q_proj|qkv_proj)\.\w*weight")


class DenseGqaCheckpoint(CheckpointReader):
    """A reader of checkpoints in which every layer is a site."""

    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS

    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        """See `CheckpointReader.describe`."""
        num_layers = layer_count(config, name)
        check_layers(config, name, num_layers, architecture)
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
        """Collect the facts that change the model; sizes that follow from others are written out.

        Raises:
            ModelConfigError: if a key is not known, or of another kind.
        """
        keys = self.keys[architecture]
        facts = keys.facts(config, name)
        sizes = {**keys.defaults, **facts}
        if sizes["num_key_value_heads"] is None:
            facts["num_key_value_heads"] = sizes["num_attention_heads"]
        if sizes["head_dim"] is None:
            facts["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        lengths = {"max_position_embeddings": sizes["max_position_embeddings"]}
        return {**facts, **rope_facts(rope_parameters({**lengths, **config}, name), name)}

    def selecting(self, model: ModelLayers, selection: Selection | None) -> ModelLayers:
        """See `CheckpointReader.selecting`; `None` is the paper's selection."""
        return super().selecting(model, selection or DEFAULT)

    def indexer_layers(self, tensors: Iterable[str]) -> frozenset[int]:
        """See `CheckpointReader.indexer_layers`."""
        return frozenset(int(match[1]) for name in tensors if (match := _QUERIES.search(name)))
