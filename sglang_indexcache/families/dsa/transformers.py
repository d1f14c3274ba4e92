"""Find attention modules and indexers in transformers' DSA models."""

from __future__ import annotations

from typing import Any

from sglang_indexcache.families.base import TransformersAdapter


def attentions(model: Any) -> list[Any]:
    """List the attention modules of a `DeepseekV32ForCausalLM` or `GlmMoeDsaForCausalLM`, without NextN layers.

    Each has an `indexer`, which is `None` where the checkpoint shares.
    """
    decoder = model.model
    return [layer.self_attn for layer in decoder.layers[: decoder.config.num_hidden_layers]]


class DsaTransformers(TransformersAdapter):
    """An adapter that finds one indexer in each attention module."""

    def indexer_modules(self, model: Any) -> list[Any]:
        """See `TransformersAdapter.indexer_modules`."""
        return [module.indexer for module in attentions(model)]
