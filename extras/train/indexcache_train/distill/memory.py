"""Estimate of a training process's memory, before anything large is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from indexcache_kernels.transformers import ROWS
from indexcache_search.errors import SearchError
from indexcache_search.hf.device import LOGIT_ROWS
from indexcache_train.distill.model import set_trainable
from indexcache_train.distill.settings import Stage
from sglang_indexcache import Pattern

_MASTER = 4  # bytes of a float32 weight that trains, and of its gradient
_ADAM = 8  # bytes of a weight's two moments


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process: weights with optimizer state, and the largest activations of a step."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes of weights and activations."""
        return self.weights + self.activations


def estimate(
    config: PreTrainedConfig,
    pattern: Pattern,
    stage: Stage,
    *,
    seq_len: int,
    micro_batch_size: int,
    processes: int,
    bfloat16: bool,
    gradient_checkpointing: bool,
    kernels: bool,
) -> MemoryEstimate:
    """Count weights exactly, and activations by their largest tensors.

    Args:
        config: the model's configuration.
        pattern: decides which indexers train.
        stage: decides whether the body trains.
        seq_len: tokens a sequence.
        micro_batch_size: sequences a forward.
        processes: number of processes that FSDP2 shards over.
        bfloat16: compute in bfloat16, else in float32.
        gradient_checkpointing: in the sparse stage, keep only a layer's input and run the layer again.
        kernels: compute without `[queries, keys]` tensors.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    set_trainable(model, pattern, stage)
    size = 2 if bfloat16 else 4
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    layers = model.model.layers
    weights = (trained * (2 * _MASTER + _ADAM) + frozen * size) // processes
    if processes > 1 or bfloat16:  # two layers are gathered: the one that runs and the next
        weights += 2 * size * max(sum(p.numel() for p in layer.parameters()) for layer in layers)

    # Tensors that a layer keeps for its gradients, and those needed while it runs forwards or backwards.
    tokens, cells = micro_batch_size * seq_len, micro_batch_size * seq_len**2
    heads, index_heads = config.num_attention_heads, config.index_n_heads
    mlp = max(config.intermediate_size, config.num_experts_per_tok * config.moe_intermediate_size)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    attention = tokens * size * 4 * heads * width
    body = tokens * size * (8 * config.hidden_size + 3 * mlp) + attention
    full = len(pattern.full_layers)
    logits = min(tokens, LOGIT_ROWS) * config.vocab_size * 12
    if kernels:
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        vectors = tokens * index_heads * config.index_head_dim * size
        block = min(tokens, ROWS) * heads * latent * size * 3
        if stage == "warmup":  # a frozen layer keeps only the gradient of its source's scores
            return MemoryEstimate(weights, max(attention + block, logits) + (len(layers) + 2 * full) * vectors)
        body += tokens * heads * (latent + config.kv_lora_rank) * size
        indexer = vectors + tokens * config.index_topk * 4
        on_top = block + 2 * tokens * heads * (width - config.v_head_dim) * size + 2 * indexer
        handed_on = full * indexer
    else:
        body += cells * heads * (5 if size == 4 else 7)  # the softmax, its rounded copy, and a mask
        indexer = cells * 4 * (index_heads + 3)
        on_top = cells * 4 * (3 * heads + 2 * index_heads)
        handed_on = full * cells * 4  # scores of indexers, kept until the last layer that they serve
    if stage == "warmup":
        activations = body + on_top + full * indexer + handed_on
    elif gradient_checkpointing:
        inputs = len(layers) * tokens * config.hidden_size * 4
        activations = inputs + handed_on + max(body + on_top + indexer, logits)
    else:
        activations = len(layers) * body + full * indexer + handed_on + max(on_top, logits)
    return MemoryEstimate(weights, activations)


def available(device: torch.device) -> int:
    """Return the bytes that a process may use on its device; memory of the CPU is shared with its neighbours."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check(need: MemoryEstimate, there: int, where: Any) -> None:
    """Refuse a run that would run out of memory.

    Raises:
        SearchError: if it needs more than is free.
    """
    if need.total > there:
        raise SearchError(
            f"about {need.total / 1e9:.1f} GB are needed in each process ({need.weights / 1e9:.1f} for weights and"
            f" optimizer, {need.activations / 1e9:.1f} for activations), {where} has {there / 1e9:.1f} free; expected"
            " more processes, a shorter --seq-len, a smaller micro_batch or gradient_checkpointing=yes"
            " of --engine, or its memory_check=no to try it"
        )
