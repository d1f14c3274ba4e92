"""Random models that both SGLang and transformers load."""

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
_DSA_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
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
            "pad_token_id": 1,  # its embedding is zero, so that all scores of its queries are alike; no prompt has it
        },
        {},
    ),
}
_MLA_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # dense
    "deepseek-v3": ("deepseek_v3", {}, _ONLY_SGLANG_READS),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * (LAYERS - 2)},
        {**_ONLY_SGLANG_READS, "first_k_dense_replace": 2, "rope_interleave": True},
    ),
}
_V4: dict[str, Any] = {  # the widths that SGLang's layouts ask for; everything else is small
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 4, 4, 4, 4],  # six letters, as the other kinds have
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "index_topk": TOPK,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
}
_ONLY_SGLANG_READS_OF_V4: dict[str, Any] = {
    **{key: _V4[key] for key in ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_theta")},
    "compress_rope_theta": _V4["compress_rope_theta"],
    "n_hash_layers": 1,
    "intermediate_size": 64,
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "num_nextn_predict_layers": 1,
}
_RELEASED = {  # names of a release, where transformers 5.19 writes others
    "hy-v4": (
        (r"\.hc_pre\.(hc_\w+_layer)\.hc_", r".\1.hc_pre.hc_"),
        (r"\.hc_pre\.hc_head\.", ".hc_head."),
        (r"(mlp\..*)linear_gate", r"\1gate_proj"),
    ),
    "deepseek-v4": (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
    ),
}

_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

KINDS = (*_DSA_KINDS, "deepseek-v4")
MLA_KINDS = tuple(_MLA_KINDS)
DENSE_KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral")
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def build(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a random model of `kind`, with bfloat16 values, which float32 engines read alike."""
    if kind in DENSE_KINDS:
        more = _EXPERTS if kind == "qwen3_moe" else {}
        model_type, content, extra = kind, {**_DENSE, **more, **changes}, {}
    elif kind == "deepseek-v4":
        model_type, content, extra = "deepseek_v4", {**_V4, **changes}, {**_ONLY_SGLANG_READS_OF_V4, **changes}
    elif kind in _MLA_KINDS:
        model_type, own, extra = _MLA_KINDS[kind]
        shared = {key: value for key, value in _SHARED.items() if not key.startswith("index_")}
        content = {**shared, **own, **changes}
    else:
        model_type, own, only = _DSA_KINDS[kind]
        content, extra = {**_SHARED, **own, **changes}, {**_ONLY_SGLANG_READS, **only}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **content)
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
            if name.endswith("tid2eid"):
                drawn = torch.rand(len(buffer), content["n_routed_experts"]).argsort(1)
                buffer.copy_(drawn[:, : buffer.shape[1]])
    model.to(torch.bfloat16).save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file({_released(kind, name): tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **extra}, indent=1))
    return folder


def with_nextn(folder: Path) -> Path:
    """Add a NextN layer to a random DSA model of `build`: a copy of its last layer behind projections of its own."""
    weights, path = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(weights), json.loads(path.read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    copies = {new + name.removeprefix(last): item.clone() for name, item in tensors.items() if name.startswith(last)}
    norms = {f"{new}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    joined = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(1)) / 16
    own = {name: item.to(torch.bfloat16) for name, item in {**norms, f"{new}eh_proj.weight": joined}.items()}
    save_file({**tensors, **copies, **own}, weights, {"format": "pt"})
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=1))
    return folder


def _released(kind: str, name: str) -> str:
    for pattern, replacement in _RELEASED.get(kind, ()):
        name = re.sub(pattern, replacement, name)
    return name
