"""A small DeepSeek-V4: its config.json, and training passes through transformers' modules.

transformers runs the indexer without gradients and always sparsely, and masks a whole square for the window, so the
three stages of training have passes of their own over the same weights. On a trained model each returns the values of
transformers (tests/scripts/test_demo_model.py). Shapes: B batch, S tokens, H heads, D head width, E entries, W window,
N residual streams.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from scripts.demo_model.glm import kl

Tables = dict[str, tuple[Tensor, Tensor]]  # cos and sin, `[1, S, rope width / 2]`, of both kinds of layers
EXTRA_TOKENS = 1  # of a training sequence, so that what the model sees is a multiple of the window
_MASKED = -1e30


def demo_config(layers: int = 21, index_topk: int = 16) -> dict[str, Any]:
    """Return a config.json as V4-Flash's: two layers with a window, then indexed and heavily compressed ones by turns.

    The compression ratios are the real ones; one of `index_topk` entries stands for four tokens.
    """
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "vocab_size": 2048,
        "hidden_size": 192,
        "num_hidden_layers": layers,
        "compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, layers))],
        "sliding_window": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "rope_theta": 10000.0,
        "compress_rope_theta": 10000.0,
        "index_topk": index_topk,
        "index_head_dim": 64,
        "index_n_heads": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_hash_layers": 0,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "swiglu_limit": 10.0,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
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
    }


def positions(model: Any, length: int, device: torch.device) -> Tables:
    """Return rotary tables of positions 0 to `length` - 1."""
    ids, like = torch.arange(length, device=device)[None], torch.zeros(1, device=device)
    return {kind: model.model.rotary_emb(like, position_ids=ids, layer_type=kind) for kind in ("main", "compress")}


def embed(model: Any, tokens: Tensor) -> Tensor:
    """Return the input of the first layer, `[B, S, N, hidden]`."""
    embedded: Tensor = model.model.embed_tokens(tokens)[:, :, None].expand(-1, -1, model.config.hc_mult, -1)
    return embedded.contiguous()


def final(model: Any, x: Tensor) -> Tensor:
    """Return the input of the head, `[B, S, hidden]`."""
    output: Tensor = model.model.norm(model.model.hc_head(x))
    return output


def dense_layer(layer: nn.Module, x: Tensor, tables: Tables) -> Tensor:
    """Run one decoder layer that attends to the window and to all entries; an indexer takes no part."""
    return _layer(layer, x, tables, None)[0]


def warmup_layer(layer: nn.Module, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Run `dense_layer` without gradients; return also the indexer's KL against the mean attention to the entries."""
    with torch.no_grad():
        output, hidden, residual, target, _ = _layer(layer, x, tables, None)
    indexer = _indexer(layer.self_attn)
    if indexer is None:
        return output, x.new_zeros(())
    return output, kl(_shares(target), index_scores(indexer, hidden, residual, tables))


def sparse_layer(layer: nn.Module, x: Tensor, tables: Tables, topk: int) -> tuple[Tensor, Tensor]:
    """Attend to the indexer's selection; return also its KL over the selected entries on a detached graph."""
    output, _, _, target, scores = _layer(layer, x, tables, topk)
    if scores is None:
        return output, x.new_zeros(())
    return output, kl(_shares(target.detach()), scores)


def _indexer(attention: Any) -> Any:
    return getattr(attention.compressor, "indexer", None)


def _shares(target: Tensor) -> Tensor:
    """Return the attention to the entries alone, which sums to 1; nothing where no entry is complete."""
    return target / target.sum(-1, keepdim=True).clamp_min(1e-9)


def _layer(
    layer: Any, x: Tensor, tables: Tables, topk: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Run one layer; return also its indexer's input, the attention to the entries, and the selected scores."""
    post, comb, collapsed = layer.attn_hc(x)
    attended, *rest = _attention(layer.self_attn, layer.input_layernorm(collapsed), tables, topk)
    x = _expand(post, comb, attended, x)
    post, comb, collapsed = layer.ffn_hc(x)
    output = _expand(post, comb, _experts(layer.mlp, layer.post_attention_layernorm(collapsed)), x)
    return (output, *rest)  # type: ignore[return-value]


def _expand(post: Tensor, comb: Tensor, output: Tensor, x: Tensor) -> Tensor:
    return post.to(x.dtype)[..., None] * output[..., None, :] + torch.matmul(comb.to(x.dtype).mT, x)


def _experts(mlp: Any, x: Tensor) -> Tensor:
    """Run the mixture of experts with all of them computed, which for four small ones is faster than sorting tokens."""
    experts, (_, weights, chosen) = mlp.experts, mlp.gate(x)
    shares = torch.zeros(*weights.shape[:-1], experts.num_experts, dtype=weights.dtype, device=x.device)
    shares = shares.scatter(-1, chosen, weights).to(x.dtype)
    hidden = F.linear(x.flatten(0, 1), experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (experts.num_experts, -1))
    active = experts._apply_gate(hidden) * shares[..., None].to(hidden.dtype)
    routed = F.linear(active.flatten(1), experts.down_proj.transpose(0, 1).flatten(1))
    output: Tensor = routed.view_as(x) + mlp.shared_experts(x)
    return output


def compress(module: Any, hidden: Tensor, ratio: int, tables: Tables) -> Tensor:
    """Compress to entries `[B, E, D]`: gated sums over `ratio` tokens, with 4 over those before, too."""
    count = hidden.shape[1] // ratio
    kv, gate = (
        project(hidden[:, : count * ratio]).unflatten(1, (count, ratio))
        for project in (module.kv_proj, module.gate_proj)
    )
    gate = gate + module.position_bias
    if kv.shape[-1] == 2 * module.head_dim:
        width = module.head_dim
        before = F.pad(kv[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
        gate_before = F.pad(gate[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=_MASKED)
        kv, gate = torch.cat([before, kv[..., width:]], 2), torch.cat([gate_before, gate[..., width:]], 2)
    entries = module.kv_norm((kv * gate.float().softmax(2).to(kv.dtype)).sum(2))
    cos, sin = (table[:, : count * ratio : ratio] for table in tables["compress"])
    rotated: Tensor = apply_rotary_pos_emb(entries[:, None], cos, sin)[:, 0]
    return rotated


def index_scores(indexer: Any, hidden: Tensor, residual: Tensor, tables: Tables) -> Tensor:
    """Return lightning indexer scores `[B, S, E]` in float32, entries that are not complete yet masked."""
    batch, length, _ = hidden.shape
    keys = compress(indexer, hidden, indexer.compress_rate, tables)
    q = indexer.q_b_proj(residual).view(batch, length, -1, indexer.head_dim).transpose(1, 2)
    q = apply_rotary_pos_emb(q, *tables["compress"])
    heads = F.relu(torch.matmul(q, keys[:, None].mT)).float() * indexer.scorer.softmax_scale
    weights = indexer.scorer.weights_proj(hidden).float() * indexer.scorer.weights_scaling
    scores: Tensor = (heads * weights.mT[..., None]).sum(1)
    return scores.masked_fill(~_complete(length, indexer.compress_rate, hidden.device), _MASKED)


def _complete(length: int, ratio: int, device: torch.device) -> Tensor:
    """Return whether an entry is complete when a query comes, `[S, E]`."""
    entries = torch.arange(length // ratio, device=device)
    return entries[None] < (torch.arange(length, device=device)[:, None] + 1) // ratio


def _bias(visible: Tensor) -> Tensor:
    """Return the bias of logits: 0 where a key is visible, else so low that nothing is left of it.

    Unlike with `masked_fill`, no mask is kept for the backward pass: of kernels that load such masks, PyTorch 2.11's
    inductor made one that ends in "misaligned address" on a GPU.
    """
    return torch.where(visible, 0.0, _MASKED)


def _windows(x: Tensor, window: int) -> Tensor:
    """Return blocks of `window` tokens, each with the block before it: `[B, blocks, 2 W, D]`."""
    blocks = F.pad(x, (0, 0, 0, -x.shape[1] % window)).unflatten(1, (-1, window))
    return torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2)


def _attention(
    attention: Any, hidden: Tensor, tables: Tables, topk: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    batch, length, _ = hidden.shape
    window, heads, device = attention.sliding_window, attention.num_heads, hidden.device
    cos, sin = tables[attention.rope_layer_type]
    residual = attention.q_a_norm(attention.q_a_proj(hidden))
    q = attention.q_b_norm(attention.q_b_proj(residual).view(batch, length, heads, -1).transpose(1, 2))
    q = apply_rotary_pos_emb(q, cos, sin)
    kv = apply_rotary_pos_emb(attention.kv_norm(attention.kv_proj(hidden))[:, None], cos, sin)[:, 0]

    near = _windows(kv, window).to(q.dtype)
    padded = F.pad(q, (0, 0, 0, -length % window)).unflatten(2, (-1, window))
    query, key = torch.arange(window, device=device)[:, None], torch.arange(2 * window, device=device)
    seen = (key > query) & (key <= query + window)
    inside = seen & ((torch.arange(near.shape[1], device=device)[:, None, None] > 0) | (key >= window))
    local = torch.matmul(padded, near[:, None].mT).float() + _bias(inside)
    logits = [local.flatten(2, 3)[:, :, :length]]

    entries, scores = None, None
    if attention.compressor is not None:
        ratio = attention.compressor.compress_rate
        entries = compress(attention.compressor, hidden, ratio, tables).to(q.dtype)
        visible = _complete(length, ratio, device)[None, None]
        indexer = _indexer(attention)
        if topk is not None and indexer is not None:
            scores = index_scores(indexer, hidden.detach(), residual.detach(), tables)
            indices = scores.detach().topk(min(topk, scores.shape[-1]), -1).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True)
            visible = visible & chosen[:, None]
            scores = scores.masked_fill(~visible[:, 0], _MASKED)
        logits.append(torch.matmul(q, entries[:, None].mT).float() + _bias(visible))
    everything = torch.cat(logits, -1) * attention.scaling
    total = torch.logaddexp(everything.logsumexp(-1, keepdim=True), attention.sinks.float().view(-1, 1, 1))
    weights = (everything - total).exp()

    shares = F.pad(weights[..., : 2 * window], (0, 0, 0, -length % window)).unflatten(2, (-1, window))
    attended = torch.matmul(shares.to(near.dtype), near[:, None]).flatten(2, 3)[:, :, :length]
    target = weights[..., 2 * window :].mean(1)
    if entries is not None:
        attended = attended + torch.matmul(weights[..., 2 * window :].to(entries.dtype), entries[:, None])
    attended = apply_rotary_pos_emb(attended, cos, -sin).transpose(1, 2)
    grouped = attended.reshape(batch, length, attention.config.o_groups, -1)
    output = attention.o_b_proj(attention.o_a_proj(grouped).flatten(2))
    return output, hidden, residual, target, scores
