"""Several processes: one model sharded over them with FSDP2, through Accelerate."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

_PREFIXES = {"glm_moe_dsa": "GlmMoeDsa", "deepseek_v32": "DeepseekV32"}


def create_accelerator(model_type: str, cpu: bool, bfloat16: bool) -> Accelerator:
    """The accelerator of this process; with others beside it (WORLD_SIZE), one that shards.

    Decoder layers are units of sharding. Indexers are units within them: their loss reaches them from other layers
    than the one that they stand in. Gradients are added up in float32, and what a unit gives keeps its dtype, where
    Accelerate's own policy would round losses and the indexers' weights.
    """
    plugin = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Read by transformers, too: the first process alone reads the weights.
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
        prefix = _PREFIXES[model_type]
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[f"{prefix}DecoderLayer", f"{prefix}Indexer"],
            reshard_after_forward=True,
            cpu_ram_efficient_loading=True,
            mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else None,
        )
    return Accelerator(cpu=cpu, mixed_precision="bf16" if bfloat16 else "no", fsdp_plugin=plugin)


def prepare(accelerator: Accelerator, model: Any, optimizer: Optimizer) -> tuple[Any, Any]:
    """The model on its device or sharded, and its optimizer.

    Accelerate 1.15 shards what a state dict holds, and stops at buffers, which FSDP2 leaves whole. So buffers are kept
    out of the state dict meanwhile, and sent to the processes that have not read them.
    """
    if accelerator.num_processes == 1:
        return tuple(accelerator.prepare(model, optimizer))
    persistent = set(model.state_dict())
    buffers = [
        (module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if f"{path}.{name}" in persistent
    ]
    for module, name in buffers:
        module.register_buffer(name, getattr(module, name), persistent=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    for module, name in buffers:
        value = getattr(module, name)
        dist.broadcast(value, src=0)
        module.register_buffer(name, value, persistent=True)
    return model, optimizer
