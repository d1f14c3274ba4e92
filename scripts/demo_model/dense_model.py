"""The dense model with latent attention: its config.json, the memory of a step, and its loss on text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_train.distill.memory import available
from scripts.demo_model import glm
from scripts.demo_model.train_demo_model import Trainer

OPTIMIZER_BYTES = 28  # of a weight: itself, gradient, moments, and what Muon holds while it steps


def model_config(layers: int, hidden: int, heads: int, vocab_size: int) -> dict[str, Any]:
    """Return config.json: GLM-4.7-Flash's architecture without experts."""
    return {
        **glm.dense_config(glm.demo_config(layers)),
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": hidden // 2,
        "kv_lora_rank": 128,
        "v_head_dim": 128,  # as wide as queries and keys, which fused attention needs
        "moe_intermediate_size": hidden,
    }


def operations(config: dict[str, Any], length: int) -> float:
    """Return the floating-point operations of a token in a training step, in sequences of `length` tokens."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    of_queries, of_keys = config["q_lora_rank"], config["kv_lora_rank"]
    queries = of_queries * (hidden + heads * (nope + rope))
    keys = hidden * (of_keys + rope) + of_keys * heads * (nope + value)
    attention = heads * (nope + rope + value) * length / 2  # half of it is masked
    layer = queries + keys + attention + heads * value * hidden + 3 * hidden * config["intermediate_size"]
    return float(6 * (config["num_hidden_layers"] * layer + config["vocab_size"] * hidden))


def check_memory(config: dict[str, Any], tokens: int, device: torch.device) -> float:
    """Return the estimated GB of a step of `tokens` tokens.

    Raises:
        SystemExit: if the device has fewer free.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weights = OPTIMIZER_BYTES * sum(item.numel() for item in model.parameters())
    heads = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    layer = 2 * (5 * heads + 4 * config["intermediate_size"]) + 12 * config["hidden_size"]
    logits = 8 * config["vocab_size"]
    need: float = weights + tokens * (config["num_hidden_layers"] * layer + logits)
    there = available(device)
    if need > there:
        raise SystemExit(
            f"about {need / 1e9:.1f} GB are needed, {device} has {there / 1e9:.1f} free; expected fewer --batch-tokens"
        )
    return need / 1e9


@torch.no_grad()
def text_losses(trainer: Trainer, corpus: Path, length: int, windows: int, batch: int) -> dict[str, float]:
    """Return the mean loss in windows of `length` tokens of each part of a corpus: trained on, and held out.

    Args:
        trainer: whose model it is.
        corpus: folder of `corpus.npz`.
        length: tokens of a window. Parts that are no longer are left out.
        windows: of each part, at the least.
        batch: windows at once; that of the training, or layers are compiled again.
    """
    arrays, losses = np.load(corpus / "corpus.npz"), {}
    rope = trainer._rope(length - 1)
    for name in arrays.files:
        if name == "words" or arrays[name].size <= length:
            continue
        stream = torch.from_numpy(arrays[name].astype(np.int32))
        starts = np.random.default_rng(trainer.seed).integers(
            stream.numel() - length, size=(-(-windows // batch), batch)
        )
        total = 0.0
        for row in starts:
            tokens = torch.stack([stream[start : start + length] for start in row.tolist()]).long().to(trainer.device)
            with torch.autocast(trainer.device.type, dtype=torch.bfloat16, enabled=trainer.device.type == "cuda"):
                x = trainer.embed(tokens)
                for layer in trainer.layers:
                    x = trainer.dense(layer, x, rope)
                total += trainer.token_losses(x, tokens).mean().item()
        losses[name] = round(total / len(starts), 4)
    return losses
