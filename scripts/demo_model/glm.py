"""A small GLM-5: its config.json, and training passes through transformers' modules: dense, indexer warm-up, sparse.

transformers runs the lightning indexer without gradients and always sparsely, so the three stages of DSA training
(paper, Section 2.1) need passes of their own over the same weights. Shapes: B batch, S tokens, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rope = tuple[Tensor, Tensor]  # cos and sin, `[S, rope width / 2]`
EXTRA_TOKENS = 0
_MASKED = -1e30
_THETA = 10000.0


def demo_config(layers: int = 16, index_topk: int = 64) -> dict[str, Any]:
    """Return the config.json of the demo model, with the keys that SGLang reads and transformers does not write."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "index_topk": index_topk,
        "index_head_dim": 128,
        "index_n_heads": 8,
        "index_topk_freq": 1,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "use_cache": True,
        "num_nextn_predict_layers": 0,
        # All MLPs are dense; the mixture-of-experts keys below are there because loaders ask for them.
        "first_k_dense_replace": layers,
        "mlp_layer_types": ["dense"] * layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def dense_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the same model without indexers: a dense `Glm4MoeLiteForCausalLM`."""
    kept = {key: value for key, value in config.items() if not key.startswith(("index_", "indexer_"))}
    return {**kept, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}


def positions(model: Any, length: int, device: torch.device) -> Rope:
    """Return rotary tables of positions 0 to `length` - 1."""
    return rope_table(length, model.config.qk_rope_head_dim, _THETA, device)


def embed(model: Any, tokens: Tensor) -> Tensor:
    """Return the input of the first layer, `[B, S, hidden]`."""
    embedded: Tensor = model.model.embed_tokens(tokens)
    return embedded


def final(model: Any, x: Tensor) -> Tensor:
    """Return the input of the head, `[B, S, hidden]`."""
    normed: Tensor = model.model.norm(x)
    return normed


def rope_table(length: int, width: int, theta: float, device: torch.device) -> Rope:
    """Return the angles of interleaved rotary embedding for positions 0 to `length` - 1."""
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate interleaved pairs of `x` (`[..., S, width]`); pairs come out split in halves, as in transformers."""
    cos, sin = (table.to(x.dtype) for table in rope)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def project(attention: Any, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the query residual `[B, S, q_lora]` and q, k, v as `[B, H, S, D]`."""
    batch, length, _ = hidden.shape
    nope, rank = attention.qk_nope_head_dim, attention.kv_lora_rank
    residual = attention.q_a_layernorm(attention.q_a_proj(hidden))
    q = attention.q_b_proj(residual).view(batch, length, attention.num_heads, -1).transpose(1, 2)
    latent = attention.kv_a_proj_with_mqa(hidden)
    k_rope = rotate(latent[..., rank:], rope)
    kv = attention.kv_b_proj(attention.kv_a_layernorm(latent[..., :rank]))
    kv = kv.view(batch, length, attention.num_heads, -1).transpose(1, 2)
    q = torch.cat([q[..., :nope], rotate(q[..., nope:], rope)], -1)
    k_rope = k_rope.to(kv.dtype)[:, None].expand(-1, attention.num_heads, -1, -1)
    return residual, q, torch.cat([kv[..., :nope], k_rope], -1), kv[..., nope:]


def index_scores(indexer: Any, hidden: Tensor, residual: Tensor, rope: Rope) -> Tensor:
    """Return lightning indexer scores `[B, S, S]` in float32, later keys masked."""
    batch, length, _ = hidden.shape
    width = indexer.qk_rope_head_dim
    q = indexer.wq_b(residual).view(batch, length, indexer.n_heads, -1).transpose(1, 2)
    k = indexer.k_norm(indexer.wk(hidden))
    q = torch.cat([rotate(q[..., :width], rope), q[..., width:]], -1)
    k = torch.cat([rotate(k[..., :width], rope), k[..., width:]], -1).to(q.dtype)
    weights = indexer.weights_proj(hidden).float() * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    heads = F.relu(torch.matmul(q, k[:, None].mT))
    scores: Tensor = (heads.float() * weights.mT[..., None]).sum(1)
    return scores.masked_fill(~_causal(length, hidden.device), _MASKED)


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _finish(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    batch, heads, length, width = attended.shape
    x = x + layer.self_attn.o_proj(attended.transpose(1, 2).reshape(batch, length, heads * width))
    output: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return output


def kl(target: Tensor, scores: Tensor) -> Tensor:
    """Average KL(target || softmax(scores)) over queries; `target` is the head-averaged attention `[B, S, S]`."""
    log_q = scores.log_softmax(-1).clamp_min(-60.0)
    return (target * (target.clamp_min(1e-9).log() - log_q)).sum(-1).mean()


def dense_layer(layer: Any, x: Tensor, rope: Rope) -> Tensor:
    """Run one decoder layer with full causal attention; the indexer takes no part."""
    _, q, k, v = project(layer.self_attn, layer.input_layernorm(x), rope)
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # one width for q, k and v: the fused kernels want it
    attended = F.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=layer.self_attn.scaling)
    return _finish(layer, x, attended[..., : v.shape[-1]])


def warmup_layer(layer: Any, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Attend densely without gradients; return also the indexer's KL against the head-averaged attention."""
    attention = layer.self_attn
    with torch.no_grad():
        hidden = layer.input_layernorm(x)
        residual, q, k, v = project(attention, hidden, rope)
        scores = torch.matmul(q, k.mT).float() * attention.scaling
        weights = scores.masked_fill(~_causal(x.shape[1], x.device), float("-inf")).softmax(-1)
        output = _finish(layer, x, torch.matmul(weights.to(v.dtype), v))
        target = weights.mean(1)
    return output, kl(target, index_scores(attention.indexer, hidden, residual, rope))


def sparse_layer(layer: Any, x: Tensor, rope: Rope, topk: int) -> tuple[Tensor, Tensor]:
    """Attend to the indexer's top-k; return also its KL over the selected tokens on a detached graph."""
    attention = layer.self_attn
    hidden = layer.input_layernorm(x)
    residual, q, k, v = project(attention, hidden, rope)
    scores = index_scores(attention.indexer, hidden.detach(), residual.detach(), rope)
    indices = scores.detach().topk(min(topk, x.shape[1]), -1).indices
    selected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True)
    selected = selected & _causal(x.shape[1], x.device)
    logits = torch.matmul(q, k.mT).float() * attention.scaling
    weights = logits.masked_fill(~selected[:, None], float("-inf")).softmax(-1)
    output = _finish(layer, x, torch.matmul(weights.to(v.dtype), v))
    return output, kl(weights.mean(1).detach(), scores.masked_fill(~selected, _MASKED))
