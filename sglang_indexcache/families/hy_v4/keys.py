"""Keys of a config.json that the code of HY-V4 reads: transformers 5.19 and 5.23, SGLang 0.5.23."""

from __future__ import annotations

from sglang_indexcache.families.dsa.keys import ALIASES, DEEPSEEK, ONLY, READ_ELSEWHERE
from sglang_indexcache.model.config_keys import ConfigKeys

_DENSE_LAYERS = "first_k_dense_replace"  # the number of dense layers is one, whatever the key says
_HY_V4 = {
    **{key: value for key, value in DEEPSEEK.items() if key != _DENSE_LAYERS},
    "vocab_size": 120832,
    "hidden_size": 2816,
    "intermediate_size": 6912,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "routed_scaling_factor": 2.827,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 16,
    "indexer_rope_interleave": True,
    "router_fp32": True,
    "hc_mult": 4,
    "hc_magnitude": 2.0,
    "hc_eps": 1e-6,
    "learnable_sink": True,
    "learnable_sink_init": 0.0,
    "swiglu_limit": 10.0,
    "enable_lm_head_fp32": True,
    "enable_ihc": True,
    "gated_mla": True,
    "gating_type": "elementwise",
}

KEYS = {
    "HYV4ForCausalLM": ConfigKeys(
        model_type="hy_v4",
        defaults=_HY_V4,
        aliases=ALIASES,
        only=ONLY,
        read_elsewhere=(*READ_ELSEWHERE, _DENSE_LAYERS),
    )
}
