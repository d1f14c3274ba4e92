"""Device, memory limits and attention implementation for running a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.transformers import check_transformers
from indexcache_search.errors import SearchError
from sglang_indexcache.families import family_of_modules

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTIONS = ("auto", "naive", "kernels")
LOGIT_ROWS = 1024  # rows of [rows, vocabulary] float32 logits held at a time: 0.6 GB for GLM-5


def target_device(name: str) -> torch.device:
    """Return the device that `--device` names; `auto` is a GPU if there is one, else the CPU.

    Raises:
        SearchError: if the name is invalid, or the device is missing.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SearchError(f"--device is {name}, expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SearchError(f"--device is {name}, expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SearchError(f"--device is {name}, but PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_attention(attention: str, device: torch.device) -> str:
    """Return `naive` or `kernels`; `auto` selects the one that suits `device`.

    Raises:
        SearchError: if the name is unknown, or kernels are requested where they don't run.
    """
    if attention not in ATTENTIONS:
        raise SearchError(f"--engine has attention={attention}, expected one of {', '.join(ATTENTIONS)}")
    if attention == "naive" or (attention == "auto" and device.type != "cuda"):
        return "naive"
    if device.type != "cuda":
        raise SearchError(
            f"--engine attention=kernels needs a CUDA device, found {device.type}; expected auto or naive"
        )
    missing = "the package triton" if find_spec("triton") is None else ""
    if not missing:
        try:
            check_transformers()
        except KernelInputError as error:
            missing = f"another version: {error}"
    if missing and attention == "kernels":
        raise SearchError(f"--engine attention=kernels needs {missing}; expected it, auto or naive")
    return "naive" if missing else "kernels"


@contextmanager
def memory_error_in_one_line(sizes: str, expected: str) -> Iterator[None]:
    """Report which sizes exhausted the memory, and a remedy, in one line.

    Raises:
        SearchError: if memory runs out.
    """
    try:
        yield
    except RuntimeError as error:  # base of torch.OutOfMemoryError; the CPU allocator raises it itself
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise SearchError(f"out of memory with {sizes}; expected {expected}") from None


@contextmanager
def on_kernels(model: Any) -> Iterator[None]:
    """Run `model` on the project's kernels inside the `with` block, as its family does.

    Raises:
        SearchError: if the kernels can't run it.
    """
    try:
        with family_of_modules(model).transformers.kernels(model):
            yield
    except KernelInputError as error:
        raise SearchError(f"the kernels can't run this model: {error}; expected --engine attention=naive") from None
