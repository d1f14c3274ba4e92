"""FlashInfer's sparse MLA by TRT-LLM in PyTorch, below the `trtllm` backend of SGLang: it is called as the library is.

Decode context parallelism attends through it alone: each rank has the KV of every n-th slot, and its part of a softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Let SGLang build the groups of decode context parallelism, which it does on known platforms alone."""
    from sglang.srt.distributed import parallel_state

    parallel_state.is_cuda = lambda: True  # asked there for nothing else


def replace_all() -> None:
    """Put the stand-in where SGLang imports the library from."""
    import flashinfer.decode
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa import dsa_dcp

    flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla = sparse_mla
    dsa_dcp.fixup_zero_kv_rows = lambda *_: None  # of rows without a key, which `sparse_mla` gives 0 and -inf
    backend = dsa_backend.DeepseekSparseAttnBackend
    workspace = torch.empty(1 << 28, dtype=torch.uint8)
    backend.workspace_buffer = property(
        lambda self: workspace, lambda self, value: None
    )  # without CUDA it would be None
    backend._multi_ctas_kv_counter_for = lambda self, num_query_rows: None


def sparse_mla(
    *,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    bmm1_scale: float,
    return_lse: bool = False,
    lse: Tensor | None = None,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from `query [rows, 1, heads, dim]` over the first `seq_lens [rows]` slots of `block_tables [rows, 1, k]`.

    `kv_cache` is `[pages, 1, page, dim]`. Returns `[rows, 1, heads, kv_lora_rank]`; with `return_lse` also the base-2
    logarithms of the softmax denominators, written into `lse [rows, heads]`.
    """
    slots = block_tables[:, 0].long()
    wanted = torch.arange(slots.shape[1]) < seq_lens[:, None]
    kv = kv_cache.reshape(-1, kv_cache.shape[-1])[slots.clamp_min(0)].float()
    scores = torch.einsum("rhd,rkd->rhk", query[:, 0].float(), kv) * bmm1_scale
    scores = scores.masked_fill(~(wanted & (slots >= 0))[:, None], -torch.inf)
    probabilities = scores.softmax(-1).nan_to_num(0)
    output = torch.einsum("rhk,rkd->rhd", probabilities, kv[..., :kv_lora_rank]).to(query.dtype)[:, None]
    if not return_lse:
        return output
    assert lse is not None
    lse.copy_(scores.logsumexp(-1) / torch.log(torch.tensor(2.0)))
    return output, lse
