"""Errors of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


class KernelInputError(ValueError):
    """Tensors don't fit together, or no kernel was made for them."""


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check a tensor's shape and dtype.

    Raises:
        KernelInputError: with both, as they are and as they should be.
    """
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise KernelInputError(f"{name} is {list(tensor.shape)} of {tensor.dtype}, expected {list(shape)} of {dtype}")


def share_evenly(heads: int, key_heads: int) -> bool:
    """Return whether each key head is shared by as many heads; there must be one at least."""
    return key_heads > 0 and heads > 0 and heads % key_heads == 0


def expect_one_device(*tensors: Tensor | None) -> None:
    """Check that tensors are on one device.

    Raises:
        KernelInputError: with the devices.
    """
    devices = sorted({str(tensor.device) for tensor in tensors if tensor is not None})
    if len(devices) > 1:
        raise KernelInputError(f"tensors are on {' and '.join(devices)}, expected one device")
