"""Random DSA models that both SGLang and transformers load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS, TOPK, VOCAB = 6, 16, 512
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "index_topk": TOPK,
    "index_head_dim": 128,  # SGLang asserts this
    "index_n_heads": 32,  # with few heads, scores of exactly zero tie at the k-th place
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,  # hard-coded in two norms of transformers
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_ONLY_SGLANG_READS: dict[str, Any] = {
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "ep_size": 1,
    "num_nextn_predict_layers": 0,
}
_GLM: dict[str, Any] = {"rope_interleave": True, "indexer_rope_interleave": True}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm-dense": ("glm_moe_dsa", {"first_k_dense_replace": LAYERS}, _GLM),
    "glm-moe": ("glm_moe_dsa", {}, _GLM),
    "deepseek-v3.2": ("deepseek_v32", {}, {}),
    "hy-v4": (
        "hy_v4",
        {
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * (LAYERS - 2),
            "indexer_types": ["full", "full", "shared", "full", "full", "shared"],
            "hc_mult": 2,
            "n_group": 1,
            "pad_token_id": 2,
        },
        {},
    ),
}
_RELEASED = (  # names of HY-V4's release, where transformers 5.19 writes others
    (r"\.hc_pre\.(hc_\w+_layer)\.hc_", r".\1.hc_pre.hc_"),
    (r"\.hc_pre\.hc_head\.", ".hc_head."),
    (r"(mlp\..*)linear_gate", r"\1gate_proj"),
)


def build(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a random model of `kind`, bfloat16 values: what float32 engines then read alike."""
    model_type, own, extra = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SHARED, **own, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if "o_proj" in name:
                parameter.mul_(3)  # attention should matter
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    if kind == "hy-v4":
        weights = folder / "model.safetensors"
        save_file({_released(name): tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **_ONLY_SGLANG_READS, **extra}, indent=1))
    return folder


def _released(name: str) -> str:
    for pattern, replacement in _RELEASED:
        name = re.sub(pattern, replacement, name)
    return name
