"""The interface of FlashAttention in PyTorch, below the `fa3` backend of SGLang: it is called as the library is."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Put the stand-in where SGLang imports the library from, and let its backend be built on a CPU."""
    package, functions = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    package.__path__ = []
    package.merge_state_v2 = None
    functions.flash_attn_with_kvcache = flash_attn_with_kvcache
    functions.flash_attn_varlen_func = None
    functions.get_scheduler_metadata = lambda **_: torch.zeros(1)
    sys.modules |= {"sgl_kernel": package, "sgl_kernel.flash_attn": functions}
    from sglang.srt.layers.attention import attention_registry

    attention_registry.ATTENTION_BACKENDS["fa3"] = _backend


def _backend(runner: Any) -> Any:
    from sglang.kernels.ops.attention import flash_attention_v3
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    flash_attention_v3._is_fa3_supported = lambda: True
    return FlashAttentionBackend(runner)


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    """SGLang's call of the library: all arguments in the order of its own function."""
    from sglang.kernels.ops.attention.flash_attention_v3 import flash_attn_with_kvcache

    given = inspect.signature(flash_attn_with_kvcache).bind(*args, **kwargs).arguments
    return _attention(**{name: given[name] for name in _READ})


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
) -> Any:
    """`q` is `[tokens, heads, dim]`, the last ones of each request; caches are `[pages, page, key heads, dim]`."""
    outputs, denominators = [], []
    for row, length in enumerate(cache_seqlens.tolist()):
        query = q[cu_seqlens_q[row] : cu_seqlens_q[row + 1]]
        pages = page_table[row, : -(-length // k_cache.shape[1])].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // cache.shape[2], dim=1)
            for cache in (k_cache, v_cache)
        )
        logits = torch.einsum("qhd,khd->hqk", query, keys) * softmax_scale
        if causal:
            position = torch.arange(length)
            logits = logits.masked_fill(position > position[length - len(query) :, None], -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), values))
        denominators.append(logits.logsumexp(-1))
    output = torch.cat(outputs)
    return (output, torch.cat(denominators, dim=1)) if return_softmax_lse else output


_READ = tuple(inspect.signature(_attention).parameters)
