"""Where the kernel that is written for Hopper runs.

Gluon, the language it is in, is an experimental part of Triton and may change with any release; so releases are listed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError
from indexcache_lab.kernels.union_attention import ROWS, TILE
from indexcache_train.kernels.attention_gradients.hopper import AFTER_LAST_TRITON, FIRST_TRITON

if TYPE_CHECKING:
    from indexcache_lab.kernels.union_attention import Unions

DIM, V_DIM, CHUNK = 576, 512, 128


def fits(q: Tensor, v_dim: int) -> bool:
    """Return whether it runs: absorbed MLA in bfloat16 on a Hopper device (NVIDIA, 9.0), with Triton 3.5 to 3.8."""
    if not q.is_cuda or torch.version.hip or torch.cuda.get_device_capability(q.device) != (9, 0):
        return False
    import triton

    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    shape = (q.shape[2], v_dim, q.dtype) == (DIM, V_DIM, torch.bfloat16)
    return shape and FIRST_TRITON <= release < AFTER_LAST_TRITON


def union_attention(q: Tensor, kv: Tensor, unions: Unions, scale: float, out: Tensor) -> None:
    """See `indexcache_lab.kernels.union_attention.union_attention`.

    Args:
        q: `[T, H, 576]`, bfloat16.
        kv: `[N, 576]`, bfloat16, from an address that is a multiple of 16.
        unions: of the queries.
        scale: what products are multiplied by.
        out: `[T, H, 512]`, written.

    Raises:
        KernelInputError: where it doesn't run.
    """
    if not fits(q, out.shape[2]) or kv.data_ptr() % 16:
        raise KernelInputError("the kernel for Hopper can't run this, see union_attention.hopper.fits")
    from indexcache_lab.kernels.union_attention.hopper_kernel import union_kernel

    heads = q.shape[1]
    union_kernel[(len(unions.counts),)](
        q, kv, unions.keys, unions.owners, unions.counts, out, scale / math.log(2), unions.keys.shape[1],
        q.shape[0] * heads, HEADS=heads, OWN=unions.queries * heads, ROWS=ROWS, MAIN=V_DIM, TAIL=DIM - V_DIM, TILE=TILE,
        CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
