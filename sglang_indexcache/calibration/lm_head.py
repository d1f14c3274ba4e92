"""The float32 LM head on tensor cores: bf16 states and weights are exact in TF32, and sums are kept in float32.

On an H100 (torch 2.11, 2048 x 6144 x 154,880) it takes 12 ms instead of 76, and errs by 1.8e-5 (root mean square;
logits of 1.6) where float32 errs by 1.2e-6 and bf16 by 2.6e-3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_indexcache.calibration.divergence import Divergence


def around_logits(divergence: Divergence | None, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `LogitsProcessor.forward`, and hand the requests of the pass to `divergence`."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    if divergence is not None:
        divergence.begin_pass(arguments["logits_metadata"])
    with _tensor_cores(getattr(arguments["lm_head"], "weight", None)):
        return original(*args, **kwargs)


@contextmanager
def _tensor_cores(weight: Any) -> Iterator[None]:
    """Let float32 products run in TF32 if `weight` is bf16 on CUDA; change nothing otherwise."""
    import torch

    if weight is None or not weight.is_cuda or weight.dtype is not torch.bfloat16:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
