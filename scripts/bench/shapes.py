"""Shapes of dense models that are timed with random weights."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {"model_type": "qwen2", "sizes": (28, 1536, 8960, 12, 2), "vocab_size": 151936},
    "7b": {"model_type": "qwen2", "sizes": (28, 3584, 18944, 28, 4), "vocab_size": 152064},
    "8b": {"model_type": "qwen3", "sizes": (36, 4096, 12288, 32, 8), "vocab_size": 151936},
    "llama-8b": {"model_type": "llama", "sizes": (32, 4096, 14336, 32, 8), "vocab_size": 128256},
    "minicpm4-8b": {"model_type": "llama", "sizes": (32, 4096, 16384, 32, 2), "vocab_size": 73448},
    "tiny": {"model_type": "llama", "sizes": (8, 512, 1024, 8, 2), "vocab_size": 1024},
}
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def config_of(shape: str, context: int) -> dict[str, Any]:
    """Return the config.json of a shape."""
    layers, hidden, inner, heads, groups = SHAPES[shape]["sizes"]
    kind = SHAPES[shape]["model_type"]
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 128 if hidden > 512 else hidden // heads,
        "vocab_size": SHAPES[shape]["vocab_size"],
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.05,
    }


def parse_cells(text: str) -> list[tuple[int, int]]:
    """Read `REQUESTSxTOKENS,...`."""
    return [(int(batch), int(context)) for batch, context in (cell.split("x") for cell in text.split(","))]
