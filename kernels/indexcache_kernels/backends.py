"""Choose the implementation of an operation that runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from torch import Tensor

from indexcache_kernels.errors import KernelInputError

Backend = Literal["auto", "naive", "triton"]


def runs_triton(backend: str, tensor: Tensor) -> bool:
    """Return whether the Triton kernel runs: with `triton`, and with `auto` on a CUDA device; else PyTorch does.

    Raises:
        KernelInputError: if there is no such backend, or Triton is not installed.
    """
    if backend not in ("auto", "naive", "triton"):
        raise KernelInputError(f"backend is {backend}, expected auto, naive or triton")
    use_triton = backend == "triton" or (backend == "auto" and tensor.is_cuda)
    if use_triton and find_spec("triton") is None:
        raise KernelInputError("the package triton is not installed; expected it, or backend naive")
    return use_triton
