"""Read DSA checkpoints: the schedule of indexers, the facts of a config.json, the tensors of indexers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from sglang_indexcache.errors import ModelConfigError, SpellingError
from sglang_indexcache.families.base import CheckpointReader
from sglang_indexcache.families.dsa.keys import KEYS
from sglang_indexcache.families.dsa.schedule import check_layer_types, expert_layers
from sglang_indexcache.families.dsa.spellings import PATTERN_KEY, Rule, read_spelling
from sglang_indexcache.model.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.model.layers import ModelLayers, layer_count, positive
from sglang_indexcache.model.rope import rope_parameters
from sglang_indexcache.pattern import Pattern

_INDEXER_WEIGHT = re.compile(r"^(?:(?!mtp|nextn|draft)\w+\.)*layers\.(\d+)\.(?:self_attn|attn|attention)\.indexer\.")


class DsaCheckpoint(CheckpointReader):
    """A reader of checkpoints in which every layer is a site."""

    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS

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
        """Collect the facts that change the model; the schedules of its layers have one form, so that they compare.

        Raises:
            ModelConfigError: if a key is not known, or says what these models don't have.
        """
        keys = self.keys[architecture]
        facts = keys.facts(config, name)
        num_layers = len(native)
        check_layer_types(config, name)
        dense = {**keys.defaults, **facts}.get("first_k_dense_replace", 1)
        experts = config.get("mlp_layer_types")
        if experts is not None and experts[:num_layers] != expert_layers(num_layers, dense):
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
        return read_spelling(config, num_layers, Rule.SGLANG_TYPES_FIRST).pattern

    def indexer_layers(self, tensors: Iterable[str]) -> frozenset[int]:
        """See `CheckpointReader.indexer_layers`."""
        return frozenset(int(match[1]) for name in tensors if (match := _INDEXER_WEIGHT.search(name)))
