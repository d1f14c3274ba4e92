"""transformers' DSA models."""

from __future__ import annotations

from typing import Any


def attentions(model: Any) -> list[Any]:
    """The attention modules of a `DeepseekV32ForCausalLM` or `GlmMoeDsaForCausalLM`, by layer; NextN layers left out.

    Each has an `indexer`, which is `None` where the checkpoint shares.
    """
    decoder = model.model
    return [layer.self_attn for layer in decoder.layers[: decoder.config.num_hidden_layers]]
