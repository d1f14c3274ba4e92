"""Keys of a config.json that the code of MiniMax-M3's text model reads: transformers 5.23, SGLang 0.5.23.

Released checkpoints hold the text model in `text_config`, and say how it chooses in `sparse_attention_config` there;
transformers writes flat names. `schedule` brings both into one form.
"""

from __future__ import annotations

from typing import Any

from sglang_indexcache.model.config_keys import ConfigKeys

WHOLE = "MiniMaxM3SparseForConditionalGeneration"  # text and images
TEXT = "MiniMaxM3SparseForCausalLM"
SAVED = "MiniMaxM3VLForCausalLM"  # the text model as transformers saves it; SGLang has none of this name
TEXT_TYPES = (None, "minimax_m2", "minimax_m3", "minimax_m3_vl_text")
WHOLE_TYPE = "minimax_m3_vl"

_TEXT: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.0,
    "rotary_dim": 64,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
# What SGLang takes from config.json and transformers has in its code, so that one value alone is this model.
_ONLY = {
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "n_shared_experts": 1,
}
_READ_ELSEWHERE = """
    sparse_attention_config layer_types moe_layer_freq mlp_layer_types hidden_act shared_intermediate_size
    index_n_heads index_head_dim index_block_size index_topk_blocks index_local_blocks
    mtp_transformer_layers num_mtp_modules
    attn_type_list layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta
    mlp_intermediate_size shared_moe_mode
""".split()  # the last two lines are MiniMax-M2's, and no code of M3 reads them

_KEYS = ConfigKeys(
    model_type="minimax_m3_vl_text",
    defaults=_TEXT,
    aliases={"num_experts": "num_local_experts"},
    only=_ONLY,
    read_elsewhere=_READ_ELSEWHERE,
)
KEYS = dict.fromkeys((WHOLE, TEXT, SAVED), _KEYS)
