"""Errors of the kernels."""


class KernelInputError(ValueError):
    """Tensors that don't fit together, or that no kernel was made for."""
