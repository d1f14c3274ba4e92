"""The LM head in float32 at the speed of TF32, where that loses nothing.

bf16 states and weights are exact in TF32, and both accumulate in float32. Without this the LM head of a model with
155K tokens of vocabulary takes as long as dozens of layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def around_logits(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook around `LogitsProcessor.forward`; leaves all that is not bf16 on CUDA alone."""
    import torch

    weight = getattr(inspect.signature(original).bind(*args, **kwargs).arguments["lm_head"], "weight", None)
    if weight is None or not weight.is_cuda or weight.dtype is not torch.bfloat16:
        return original(*args, **kwargs)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return original(*args, **kwargs)
    finally:
        torch.set_float32_matmul_precision(before)
