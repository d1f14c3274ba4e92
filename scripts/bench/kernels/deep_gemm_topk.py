"""The yardstick of indexer_topk: DeepGEMM's scores followed by SGLang's selection, float8 keys only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOPK = 2048  # what fast_topk was written for
PAGE = 64  # tokens of a page of SGLang's index keys


def fast_topk(scores: Tensor, lengths: Tensor, starts: Tensor | None = None) -> Tensor:
    """Select as SGLang does, `[rows, TOPK]`, int32, relative to `starts`.

    It is not exact: some of the highest scores are left out (`fast_topk_exactness.py`).
    """
    import sgl_kernel

    found: Tensor = sgl_kernel.fast_topk_v2(scores, lengths, TOPK, row_starts=starts)
    return found


def flashinfer_topk(
    scores: Tensor, lengths: Tensor, starts: Tensor | None = None, topk: int = TOPK, graph_safe: bool = True
) -> Tensor:
    """Select by FlashInfer, as SGLang calls it with `--dsa-topk-backend flashinfer`: of equal scores the first.

    It takes rows without gaps alone, which DeepGEMM's ragged scores have.
    """
    import flashinfer

    found: Tensor = flashinfer.top_k_ragged_transform(
        scores.contiguous(),
        torch.zeros_like(lengths),
        lengths,
        topk,
        deterministic=True,
        tie_break=1,
        dsa_graph_safe=graph_safe,
        row_starts=starts,
    )
    return found


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    k_scale: Tensor,
    rows: int,
    select: Callable[[Tensor, Tensor, Tensor], Tensor] = fast_topk,
) -> Tensor:
    """Compute `indexcache_kernels.indexer_topk`, in no particular order.

    On a Hopper device with both installed; keys of 128 dimensions, 32 or 64 heads. `rows` says of how many queries
    scores exist at a time.
    """
    import deep_gemm

    found = torch.empty((len(q), TOPK), dtype=torch.int32, device=q.device)
    for first in range(0, len(q), rows):
        part = slice(first, first + rows)
        start, end = starts[part], ends[part]
        logits = deep_gemm.fp8_mqa_logits(q[part], (k, k_scale), weights[part], start, end, clean_logits=False)
        chosen = select(logits, end - start, start)
        found[part] = torch.where(chosen < 0, chosen, chosen + start[:, None])
    return found


class Decoding:
    """A decode step as SGLang makes it: keys in pages, each request's scores, the selection.

    Args:
        q: `[B, H, 128]`, float8.
        k: `[B x L, 128]`, float8, L keys of each request; L is a multiple of 64.
        weights: `[B, H]`, float32.
        k_scale: `[B x L]`, float32.
    """

    def __init__(self, q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor) -> None:
        import deep_gemm

        batch, device = len(q), q.device
        self._length = len(k) // batch
        keys = k.view(torch.uint8).view(-1, PAGE * k.shape[1])
        scales = k_scale.view(torch.uint8).view(-1, PAGE * 4)
        self._pages = torch.cat([keys, scales], dim=1).view(-1, PAGE, 1, k.shape[1] + 4)
        self._table = torch.arange(len(keys), dtype=torch.int32, device=device).view(batch, -1)
        self._q, self._weights = q[:, None], weights
        self._lengths = torch.full((batch,), self._length, dtype=torch.int32, device=device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._plan: Any = deep_gemm.get_paged_mqa_logits_metadata(self._lengths[:, None], PAGE, processors)

    def __call__(self, select: Callable[[Tensor, Tensor], Tensor] = fast_topk) -> Tensor:
        """Select each request's keys, `[B, TOPK]`, int32."""
        import deep_gemm

        scores = deep_gemm.fp8_paged_mqa_logits(
            self._q,
            self._pages,
            self._weights,
            self._lengths[:, None],
            self._table,
            self._plan,
            self._length,
            clean_logits=False,
        )
        return select(scores, self._lengths)
