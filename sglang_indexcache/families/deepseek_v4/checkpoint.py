"""Read DeepSeek-V4 checkpoints: which layers have an indexer, the facts of a config.json, the tensors of indexers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from sglang_indexcache.families.base import CheckpointReader
from sglang_indexcache.families.deepseek_v4.keys import DEFAULT_HASH_LAYERS, KEYS
from sglang_indexcache.families.deepseek_v4.schedule import CHOOSING_RATIO, compression_ratios, hash_layers, rotary
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.model.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.model.layers import ModelLayers, positive
from sglang_indexcache.pattern import Pattern


class DeepseekV4Checkpoint(CheckpointReader):
    """A reader of checkpoints whose layers with compression ratio 4 are the sites."""

    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS
    indexer_weight = re.compile(
        r"^(?:(?!mtp|nextn|draft)\w+\.)*layers\.(\d+)\.(?:attn|self_attn|self_attn\.compressor)\.indexer\."
    )

    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        """See `CheckpointReader.describe`."""
        ratios = compression_ratios(config, name)
        layers = tuple(layer for layer, ratio in enumerate(ratios) if ratio == CHOOSING_RATIO)
        if not layers:
            raise ModelConfigError(f"{name}: config.json: no layer has compression ratio 4, so none has an indexer")
        index_topk = positive(config, "index_topk", name)
        return ModelLayers(
            name=name,
            architecture=architecture,
            layers=layers,
            index_topk=index_topk,
            first_sparse_position=CHOOSING_RATIO * index_topk,
            native=Pattern.full(len(layers)),
            **identity(architecture, self._facts(config, name, architecture, ratios), config),
        )

    def _facts(
        self, config: Mapping[str, Any], name: str, architecture: str, ratios: tuple[int, ...]
    ) -> dict[str, Any]:
        """Collect the facts that change the model; schedules and rotary parameters have one form, to compare them."""
        facts = {**self.keys[architecture].facts(config, name), "compress_ratios": list(ratios)}
        hashed = hash_layers(config, len(ratios), name)
        if hashed != DEFAULT_HASH_LAYERS:
            facts["num_hash_layers"] = hashed
        for kind, rope in rotary(config, name).items():
            facts |= rope_facts(rope, name, f"rope_parameters.{kind}")
        return facts
