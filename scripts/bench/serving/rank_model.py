r"""Write the config of a model whose layers have what a rank of GLM-5 or GLM-4.7-Flash has, to time it.

    python -m scripts.bench.serving.rank_model /tmp/glm-5-tp8                       # one GPU is one of eight ranks
    python -m scripts.bench.serving.rank_model /tmp/glm-5-two --gpus 2              # each of two GPUs is one of eight
    python -m scripts.bench.serving.rank_model /tmp/glm-5-64h --heads 64            # attention is not divided by heads
    python -m scripts.bench.serving.rank_model /tmp/glm-5-tp8-fp8 --weights fp8     # blocks of 128 x 128, as GLM-5-FP8
    python -m scripts.bench.serving.rank_model /tmp/glm-5-mtp --experts 0 --layers 48 --nextn 1
    python -m scripts.bench.serving.rank_model /tmp/flash --shape glm-4.7-flash --ranks 1 --heads 16 \
        --experts 8 --layers 47

Weights are random (`load_format` dummy). `rank_of.json` beside it says of which model these are ranks. The first two
layers (of GLM-4.7-Flash one) have a dense MLP, so that it is timed, too. With `--experts 0` all have one, as wide as
what a token sees of the experts. GLM-4.7-Flash has no indexers; here each layer has one of GLM-5's, as in the paper.
With `--experts` or `--nextn` it is no rank of that model, so `prices` takes it for none: there is no `rank_of.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DENSE = 2
GLM_5 = {
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "num_attention_heads": 64,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "q_lora_rank": 2048,
}
FLASH = GLM_5 | {
    "num_hidden_layers": 47,
    "first_k_dense_replace": 1,
    "num_attention_heads": 20,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
}
SHAPES = {"glm-5": GLM_5, "glm-4.7-flash": FLASH}
EXPERTS = ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
WEIGHTS = {
    "bf16": {},
    "fp8": {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="glm-5")
    parser.add_argument("--ranks", type=int, default=8, help="among which the model is divided")
    parser.add_argument("--gpus", type=int, default=1, help="that the model will run on, each like one of these ranks")
    parser.add_argument("--heads", type=int, help="attention heads of the model; by default the share of the GPUs")
    parser.add_argument("--experts", type=int, help="experts of a layer; 0 for a dense MLP as wide as a token sees")
    parser.add_argument("--nextn", type=int, default=0, help="layers that draft tokens (MTP)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--weights", choices=sorted(WEIGHTS), default="bf16")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if shape["moe_intermediate_size"] % options.ranks or options.gpus > options.ranks:
        parser.error(f"--ranks {options.ranks}, --gpus {options.gpus}: {options.shape} is not divided like that")
    config = rank_config(
        ranks=options.ranks,
        gpus=options.gpus,
        heads=options.heads,
        layers=options.layers,
        dtype=options.weights,
        shape=shape,
        experts=options.experts,
        num_nextn_predict_layers=options.nextn,
    )
    stand_in = options.experts is not None or options.nextn
    write(options.folder, config, None if stand_in else rank_of(config, options.ranks, options.gpus, shape))


def rank_config(
    *,
    ranks: int,
    gpus: int,
    heads: int | None,
    layers: int,
    dtype: str,
    shape: dict[str, int] = GLM_5,
    experts: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return config.json of a model that on `gpus` gives each what it has of `shape` among `ranks`."""
    shares = {
        key: shape[key] * gpus // ranks for key in ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
    }
    dense = min(DENSE, shape["first_k_dense_replace"])
    if experts == 0:
        dense = layers
        seen = shape["num_experts_per_tok"] + shape["n_shared_experts"]
        shares["intermediate_size"] = seen * shares["moe_intermediate_size"]
    elif experts is not None:
        shares["n_routed_experts"] = experts
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
        "max_position_embeddings": 202752,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "use_cache": True,
        "num_nextn_predict_layers": 0,
        **shape,
        **shares,
        "num_hidden_layers": layers,
        "first_k_dense_replace": dense,
        **WEIGHTS[dtype],
    }
    if heads is not None:
        config["num_attention_heads"] = heads
    config["num_key_value_heads"] = config["num_attention_heads"]
    return config | more


def rank_of(config: dict[str, Any], ranks: int, gpus: int, shape: dict[str, int] = GLM_5) -> dict[str, Any]:
    """Return `rank_of.json`: a model on `ranks`, of which one is measured, or what several GPUs run together."""
    whole = shape if gpus == 1 else config
    return {
        "tp": ranks if gpus == 1 else gpus,
        "layers": shape["num_hidden_layers"],
        "dense_layers": shape["first_k_dense_replace"],
        "shape": {key: whole[key] for key in EXPERTS},
    }


def write(folder: Path, config: dict[str, Any], whole: dict[str, Any] | None = None) -> None:
    """Write a model's folder, with `rank_of.json` if it is a rank of one."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    for name, content in (("config", config), ("generation_config", generation), ("rank_of", whole)):
        file = folder / f"{name}.json"
        if content is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
