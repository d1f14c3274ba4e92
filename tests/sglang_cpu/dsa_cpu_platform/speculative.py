"""Speculative decoding (NextN/EAGLE) where SGLang calls CUDA; its Triton kernels need `TRITON_INTERPRET=1`."""

from __future__ import annotations

import torch
from torch import Tensor


def replace_all() -> None:
    """Replace what needs a GPU."""
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.layers.attention import dsa_backend

    torch.cuda.synchronize = lambda device=None: None
    spec_tree._is_xpu = True  # whose trees are built by Triton
    dsa_backend.seqlens_expand_triton = expand_lengths


def expand_lengths(extend_seq_lens: Tensor, seq_lens: Tensor, total_len: int, max_q_len: int) -> Tensor:
    """Replaces `seqlens_expand_triton`: how many tokens each of the last `extend_seq_lens` of a request sees."""
    pairs = zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
    lengths = [length for count, total in pairs for length in range(total - count + 1, total + 1)]
    return torch.tensor([*lengths, *[0] * (total_len - len(lengths))], dtype=torch.int32).clamp_min(0)
