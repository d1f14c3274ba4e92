"""Keys of a config.json that the code of DSA models reads: transformers 5.17 and 5.23, SGLang 0.5.17 and 0.5.23."""

from __future__ import annotations

from typing import Any

from sglang_indexcache.families.dsa.override import FREQ_KEY, OFFSET_KEY, PATTERN_KEY, TYPES_KEY
from sglang_indexcache.model.config_keys import ConfigKeys

ALIASES = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
ONLY = {"index_kpool": 1, "index_kpool_compress": False, "mla_nope": False, "use_mla_nope": False}
# The head dimension of rotary embeddings and that of queries follow from others; the family reads the schedules. Of
# these, `use_index_cache` is vLLM's switch for them before 0.33: SGLang and transformers go by the schedule alone.
READ_ELSEWHERE = (
    "head_dim",
    "qk_head_dim",
    "layer_types",
    "mlp_layer_types",
    "cli_factor",
    PATTERN_KEY,
    TYPES_KEY,
    FREQ_KEY,
    OFFSET_KEY,
    "use_index_cache",
)

DEEPSEEK: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "indexer_rope_interleave": False,
    "router_fp32": False,
    "swiglu_limit": None,
    "num_hash_layers": None,
}
_GLM = {
    **DEEPSEEK,
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
}

KEYS = {
    "DeepseekV32ForCausalLM": ConfigKeys(
        model_type="deepseek_v32", defaults=DEEPSEEK, aliases=ALIASES, only=ONLY, read_elsewhere=READ_ELSEWHERE
    ),
    "GlmMoeDsaForCausalLM": ConfigKeys(
        model_type="glm_moe_dsa", defaults=_GLM, aliases=ALIASES, only=ONLY, read_elsewhere=READ_ELSEWHERE
    ),
}
