"""What is replaced in SGLang 0.5.23, and by what."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from dsa_cpu_platform.attention import gather_decode, gather_prefill, sparse_attention
from dsa_cpu_platform.indexer import indexer_forward, read_buffer, select_paged, select_ragged, transferred

_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend."
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer."
_EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
_GATHER = "sglang.kernels.ops.attention.dsa.transform_index."


def register_hooks() -> None:
    """Register the replacements; SGLang applies them before it builds anything."""
    torch.cuda.get_device_capability = lambda *_, **__: (8, 0)  # asked for DSA models without a look at the device
    replacements = {
        # bf16 or fp8 KV is DSA's default; float32 runs keep the model's dtype
        "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default": lambda _: {},
        _GATHER + "transform_index_page_table_decode": gather_decode,
        _GATHER + "transform_index_page_table_prefill": gather_prefill,
        _BACKEND + "_forward_tilelang": sparse_attention,
        _BACKEND + "_forward_flashmla_sparse": sparse_attention,  # the only one with attention sinks
        _INDEXER + "forward_native": indexer_forward,
        _INDEXER + "_get_topk_ragged": select_ragged,
        _INDEXER + "_get_topk_paged": select_paged,
        _INDEXER + "_get_index_k_read_buffer": staticmethod(read_buffer),
        "sglang.srt.mem_cache.index_key_cache.IndexKeyCache.state_buf_infos": transferred,
    }
    for target, replacement in replacements.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", _rope, HookType.AROUND)
    HookRegistry.register(_EXPERTS, _experts, HookType.AROUND)
    adjust = "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp"
    HookRegistry.register(adjust, _one_key_head, HookType.AROUND)


def _experts(original: Any, layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """With expert parallelism, those of other ranks have the number -1, which SGLang's plain torch does not expect."""
    weights, experts, _ = topk_output
    if (experts >= 0).all():
        found: torch.Tensor = original(layer, x, topk_output, config)
        return found
    summed = torch.zeros_like(x)
    for expert, (up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        rows, places = (experts == expert).nonzero(as_tuple=True)
        gate, value = torch.nn.functional.linear(x[rows], up).chunk(2, dim=-1)
        answer = torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, down)
        summed.index_add_(0, rows, answer * weights[rows, places, None].to(x.dtype))
    return summed


def _one_key_head(original: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
    """On a CPU it would give each rank of DeepSeek-V4 a key head, of which there is one."""
    kind = model_config.hf_config.model_type
    return model_config if kind == "deepseek_v4" else original(model_config, *args, **kwargs)


def _rope(original: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's CPU rope only knows yarn; the plain one serves the rest. Argument 5 is the scaling."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return original(*args, **kwargs) if args[5] else get_rope(*args[:8])
