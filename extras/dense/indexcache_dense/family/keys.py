"""Keys of a config.json that the code of dense models reads: transformers 5.17 and 5.23, SGLang 0.5.17 and 0.5.23."""

from __future__ import annotations

from typing import Any

from sglang_indexcache.model.config_keys import ConfigKeys

WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

_ALL: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_LLAMA = {
    **_ALL,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = {
    **_ALL,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_QWEN3_MOE = {
    **_ALL,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
}
_ROTATION = {"rope_is_neox_style": True}  # read by SGLang's code, which Mistral shares

KEYS = {
    "LlamaForCausalLM": ConfigKeys(
        model_type="llama", defaults=_LLAMA, only=_ROTATION, read_elsewhere=("layer_types",)
    ),
    "Qwen2ForCausalLM": ConfigKeys(model_type="qwen2", defaults=_ALL, read_elsewhere=WINDOW_KEYS),
    "Qwen3ForCausalLM": ConfigKeys(
        model_type="qwen3",
        defaults={**_ALL, "head_dim": 128, "attention_bias": False},
        only={"use_qk_norm": True},  # its code does so, whatever the key says
        read_elsewhere=WINDOW_KEYS,
    ),
    "Qwen3MoeForCausalLM": ConfigKeys(
        model_type="qwen3_moe",
        defaults=_QWEN3_MOE,
        aliases={"num_local_experts": "num_experts"},
        only={"use_qk_norm": True},
        read_elsewhere=WINDOW_KEYS,
    ),
    "MistralForCausalLM": ConfigKeys(
        model_type="mistral", defaults=_MISTRAL, only=_ROTATION, read_elsewhere=WINDOW_KEYS
    ),
}
