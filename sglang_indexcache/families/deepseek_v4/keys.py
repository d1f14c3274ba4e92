"""Keys of a config.json that the code of DeepSeek-V4 reads: transformers 5.17 and 5.23, SGLang 0.5.17 and 0.5.23."""

from __future__ import annotations

from sglang_indexcache.model.config_keys import ConfigKeys

DEFAULT_HASH_LAYERS = 3
DEFAULT_COMPRESS_THETA = 160000
DEFAULT_ROTARY_SHARE = 64 / 512

_V4 = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "hc_pre_from_prev_sublayer": False,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "q_head_norm": True,
}
# SGLang's configuration class has these from DeepSeek-V3, and no code of V4 reads them.
_OF_V3 = """
    first_k_dense_replace intermediate_size kv_lora_rank moe_layer_freq n_group qk_nope_head_dim topk_group v_head_dim
""".split()
_READ_ELSEWHERE = """
    compress_ratios compress_rates compress_rate_csa compress_rate_hca compress_rope_theta layer_types mlp_layer_types
    num_hash_layers n_hash_layers qk_rope_head_dim index_source_layer_ids kv_source_layer_ids
""".split()

KEYS = {
    "DeepseekV4ForCausalLM": ConfigKeys(
        model_type="deepseek_v4",
        defaults=_V4,
        aliases={"num_local_experts": "n_routed_experts", "window_size": "sliding_window"},
        only={"candidate_source_layer_id": -1},
        read_elsewhere=(*_OF_V3, *_READ_ELSEWHERE),
    )
}
