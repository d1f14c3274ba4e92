"""Read DSA checkpoints: the schedule of indexers, the facts of a config.json, the tensors of indexers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from sglang_indexcache.families.base import CheckpointReader
from sglang_indexcache.families.dsa.keys import KEYS
from sglang_indexcache.families.dsa.override import PATTERN_KEY, read_spelling
from sglang_indexcache.io.errors import ModelConfigError, SpellingError
from sglang_indexcache.model.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.model.layers import ModelLayers, layer_count, positive
from sglang_indexcache.model.rope import rope_parameters
from sglang_indexcache.pattern import Pattern

_SPARSE_NAMES = ("indexed_attention", "deepseek_sparse_attention")  # of transformers since 5.22, and before


class DsaCheckpoint(CheckpointReader):
    """A reader of checkpoints in which every layer is a site."""

    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS
    indexer_weight = re.compile(r"^(?:(?!mtp|nextn|draft)\w+\.)*layers\.(\d+)\.(?:self_attn|attn|attention)\.indexer\.")

    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        """See `CheckpointReader.describe`."""
        num_layers = layer_count(config, name)
        try:
            native = self.native(config, num_layers)
        except SpellingError as error:
            raise ModelConfigError(f"{name}: config.json: {error}") from None
        index_topk = positive(config, "index_topk", name)
        return ModelLayers(
            name=name,
            architecture=architecture,
            layers=tuple(range(num_layers)),
            index_topk=index_topk,
            first_sparse_position=index_topk,
            native=native,
            **identity(architecture, self._facts(config, name, architecture, native), config),
        )

    def _facts(self, config: Mapping[str, Any], name: str, architecture: str, native: Pattern) -> dict[str, Any]:
        """Collect the facts that change the model; the schedules of its layers have one form, so that they compare."""
        keys = self.keys[architecture]
        facts = keys.facts(config, name)
        num_layers = len(native)
        _check_layer_types(config, name)
        dense = {**keys.defaults, **facts}.get("first_k_dense_replace", 1)
        experts = config.get("mlp_layer_types")
        first_dense = ["dense"] * min(dense, num_layers) + ["sparse"] * max(num_layers - dense, 0)
        if experts is not None and experts[:num_layers] != first_dense:
            facts["mlp_layer_types"] = experts[:num_layers]
        if native.shared_layers:
            facts[PATTERN_KEY] = native.roles
        lengths = {"max_position_embeddings": keys.defaults["max_position_embeddings"]}
        return {**facts, **rope_facts(rope_parameters({**lengths, **config}, name), name)}

    def native(self, config: Mapping[str, Any], num_layers: int) -> Pattern:
        """Read the pattern that a config.json declares; all `F` where it says nothing.

        Raises:
            SpellingError: if its sharing keys can't be read.
        """
        return read_spelling(config, num_layers)


def _check_layer_types(config: Mapping[str, Any], name: str) -> None:
    """Check that all layers have an indexer, or reuse another layer's selection."""
    for key in ("layer_types", "mlp_layer_types"):
        kinds = config.get(key)
        if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
            raise ModelConfigError(f"{name}: config.json: {key} is {str(kinds)[:60]!r}, expected a list of words")
    other = next((kind for kind in config.get("layer_types") or () if kind not in _SPARSE_NAMES), None)
    if other is not None:
        raise ModelConfigError(f"{name}: config.json: layer_types has {other!r}, expected {_SPARSE_NAMES[0]} alone")
