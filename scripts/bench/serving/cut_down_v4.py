r"""The config.json of a DeepSeek-V4 with V4-Flash's shapes, but few layers and experts, for timings.

    python -m scripts.bench.serving.cut_down_v4 --output build/v4-cut
    python -m scripts.bench.serving.plugin --model build/v4-cut --pattern FSSS --pairs gain --rounds 1 --repeats 2 \
        --lengths 32768,131072,262144 --engine '{"load_format": "dummy", "skip_tokenizer_init": true, ...}'

SGLang must know that the experts are not 4 bits wide (SGLANG_DSV4_FP4_EXPERTS=0) and that no weight is fp8
(SGLANG_OPT_FP8_WO_A_GEMM=0); docs/evidence/deepseek-v4.md has the arguments of its engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scripts.bench.serving.rank_model import write


def config(experts: int) -> dict[str, Any]:
    """Return a config.json of eight layers: a window, then indexed and heavily compressed ones by turns."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 2048,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 8,
        "compress_ratios": [0, 4, 128, 4, 128, 4, 128, 4],
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 448,
        "v_head_dim": 512,
        "q_lora_rank": 1024,
        "kv_lora_rank": 512,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "window_size": 128,
        "sliding_window": 128,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_hash_layers": 0,
        "n_hash_layers": 0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/v4-cut"))
    parser.add_argument("--experts", type=int, default=32)
    options = parser.parse_args()
    write(options.output, config(options.experts))
