"""cuDNN's backward of DeepSeek sparse attention, to compare with: the package nvidia-cudnn-frontend, where installed.

Its documented layout: keys `[L, 576]` without an axis of heads, an attention sink a head (-inf: none), and the natural
logarithm of the softmax's denominator.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _backward() -> Any:
    """Return its function, or the line that says why it can't run."""
    try:
        from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper
    except (ImportError, OSError, AttributeError) as error:
        return f"cuDNN's backward is not installed ({error}); expected nvidia-cudnn-frontend[cutedsl] 1.32 or newer"
    return sparse_attention_backward_wrapper


def refusal() -> str | None:
    """Return why cuDNN's backward can't be timed, in one line; None where it can."""
    found = _backward()
    return found if isinstance(found, str) else None


def gradients(
    q: Tensor, k: Tensor, indices: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `q`, `[T, H, 576]`, and `k`, `[L, 1, 576]`, whose first 512 dimensions are the values."""
    sink = torch.full((q.shape[1],), -torch.inf, device=q.device)
    found = _backward()(q, k[:, 0], out, d_out, lse, sink, indices, softmax_scale=scale)
    return found["dq"], found["dkv"][:, None]
