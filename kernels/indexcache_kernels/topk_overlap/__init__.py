"""How many indices layers have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from indexcache_kernels.backends import Backend, runs_triton
from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.topk_overlap import naive


def topk_overlap(indices: Tensor, backend: Backend = "auto") -> Tensor:
    """|Ti & Tj| of all pairs of layers, on each row.

    Args:
        indices: `[layers, rows, k]`, int32: what each layer selected for each row, in any order, each index once; -1
            where it selected fewer.
        backend: `naive` is PyTorch with k x k comparisons, `triton` needs a CUDA device or TRITON_INTERPRET=1; `auto`
            takes that on CUDA.

    Returns:
        `[rows, layers, layers]`, int32; how many a layer selected stands on the diagonal.

    Raises:
        KernelInputError: if `indices` has another shape or dtype.
    """
    if indices.ndim != 3 or indices.dtype != torch.int32:
        raise KernelInputError(
            f"indices is {list(indices.shape)} of {indices.dtype}, expected [layers, rows, k] of int32"
        )
    if not runs_triton(backend, indices):
        return naive.topk_overlap(indices)
    from indexcache_kernels.topk_overlap import triton

    return triton.topk_overlap(indices)
