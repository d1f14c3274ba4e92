"""Random models of MiniMax-M3's kind: seven layers, the first and the fourth of which choose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS, SITES = 7, (1, 2, 4, 5, 6)
BLOCK, TOPK, VOCAB = 4, 4, 96
TOKENS = BLOCK * TOPK  # up to here every query attends to everything
FREQ = [int(layer in SITES) for layer in range(LAYERS)]
EXPERTS = [0, 0, 1, 1, 1, 1, 1]

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def sparse(**changes: Any) -> dict[str, Any]:
    """How a released model says which layers choose."""
    return {
        "use_sparse_attention": True,
        "sparse_index_dim": 32,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": TOPK,
        "sparse_block_size": BLOCK,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_disable_index_value": FREQ,
        "sparse_attention_freq": FREQ,
        **changes,
    }


def text(**changes: Any) -> dict[str, Any]:
    """The text model as in a release, without architecture."""
    return {
        **TEXT,
        "model_type": "minimax_m2",
        "hidden_act": "swigluoai",
        "rope_theta": 10000,
        "partial_rotary_factor": 0.5,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "n_shared_experts": 1,
        "moe_layer_freq": EXPERTS,
        "sparse_attention_config": sparse(),
        **changes,
    }


def alone(**changes: Any) -> dict[str, Any]:
    """config.json of a text model that SGLang loads."""
    return {"architectures": ["MiniMaxM3SparseForCausalLM"], **text(**changes)}


def whole(**changes: Any) -> dict[str, Any]:
    """config.json of a model that sees images, too."""
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "image_token_index": 90,
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 2},
        "text_config": text(**changes),
    }


def build(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random text model as transformers does; bfloat16 values, which float32 engines read alike."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "minimax_m3_vl_text",
        **{
            **TEXT,
            "rope_parameters": _ROTARY,
            "layer_types": ["minimax_m3_sparse" if site else "full_attention" for site in FREQ],
            "mlp_layer_types": ["sparse" if item else "dense" for item in EXPERTS],
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_block_size": BLOCK,
            "index_topk_blocks": TOPK,
            "index_local_blocks": 1,
            **changes,
        },
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if ".indexer." in name and parameter.dim() == 2:
                parameter.mul_(3)  # choices should be far apart
            if "o_proj" in name:
                parameter.mul_(3)  # attention should matter
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def released(saved: Path, folder: Path) -> Path:
    """Copy a model of `build` with the names and the config.json of a release, for SGLang."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(saved / "model.safetensors").items():
        start, layer, rest = name.partition(".mlp.")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for own, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    tensors[f"{start}.block_sparse_moe.experts.{expert}.{own}.weight"] = half.clone()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                tensors[f"{start}.block_sparse_moe.experts.{expert}.w2.weight"] = down.clone()
        elif name.endswith("gate_up_proj.weight"):
            mixture = f"{start}.block_sparse_moe.shared_experts" if "shared_experts" in name else f"{start}.mlp"
            for own, half in zip(("gate_proj", "up_proj"), value.chunk(2), strict=True):
                tensors[f"{mixture}.{own}.weight"] = half.clone()
        elif layer and rest.startswith(("gate.", "shared_experts.")):
            rest = rest.replace("gate.e_score_correction_bias", "e_score_correction_bias")
            tensors[f"{start}.block_sparse_moe.{rest}"] = value
        else:
            tensors[name.replace(".indexer.", ".index_")] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(alone()))
    return folder
