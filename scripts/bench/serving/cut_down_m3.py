r"""The config.json of a MiniMax-M3 with the shapes of one of four ranks, but few layers and experts, for timings.

    python -m scripts.bench.serving.cut_down_m3 --output build/m3-cut
    python -m scripts.bench.serving.prefill --model build/m3-cut --lengths 32768,131072 plain 'all-f=F*13' ...

docs/upstream/minimax-m3.md has the arguments of its engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scripts.bench.serving.rank_model import write

LAYERS, WHOLE = 16, 3  # the first ones attend to everything


def config(experts: int) -> dict[str, Any]:
    """Return a config.json of sixteen layers, thirteen of them with an index."""
    sparse = [0] * WHOLE + [1] * (LAYERS - WHOLE)
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m2",
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
        "hidden_size": 6144,
        "intermediate_size": 768,
        "dense_intermediate_size": 3072,
        "shared_intermediate_size": 768,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5_000_000,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_layer_freq": sparse,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "max_position_embeddings": 202752,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 1,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_disable_index_value": sparse,
            "sparse_attention_freq": sparse,
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/m3-cut"))
    parser.add_argument("--experts", type=int, default=16)
    options = parser.parse_args()
    write(options.output, config(options.experts))
