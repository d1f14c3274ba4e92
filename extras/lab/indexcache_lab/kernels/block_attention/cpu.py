"""The C++ kernel, compiled by PyTorch's toolchain on the machine that runs it, and kept for later processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from indexcache_kernels.errors import KernelInputError

SOURCE = Path(__file__).with_name("block_attention.cpp")
FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}
DIMENSIONS = (32, 64, 80, 96, 128, 256)  # of heads, that it is compiled for


def missing(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> str | None:
    """Say why the kernel can't run on these tensors, as the end of a sentence; `None` if it can.

    Compiles it at the first call.
    """
    if q.shape[1] > 1:
        return f"takes one query a request, found {q.shape[1]}"
    if bias is not None:
        return "has no bias"
    if torch.is_grad_enabled() and any(item.requires_grad for item in (q, k, v)):
        return "has no gradients"
    if q.device.type != "cpu":
        return f"needs tensors on the CPU, found {q.device.type}"
    for tensor in (q, v):
        if tensor.shape[-1] not in DIMENSIONS:
            return f"has no heads of {tensor.shape[-1]} dimensions"
    return compiled(torch.backends.cpu.get_cpu_capability())


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, scale: float, block_tokens: int, lengths: Tensor
) -> Tensor:
    """Run `indexcache_lab.kernels.block_attention` compiled; only where `missing` returns None."""
    op = getattr(torch.ops, _name(torch.backends.cpu.get_cpu_capability())).block_attention
    try:
        out: Tensor = op(q.contiguous(), k, v, blocks.contiguous(), lengths.contiguous(), scale, block_tokens)
    except ValueError as error:
        raise KernelInputError(str(error).splitlines()[0]) from None
    return out


@cache
def compiled(capability: str) -> str | None:
    """Compile and load the kernel for `AVX512` or `AVX2`, or say why not, as `missing` does."""
    flags = FLAGS.get(capability)
    if flags is None:
        return f"needs AVX2 or AVX-512, found {capability}"
    for tool in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(tool) is None:
            return f"needs {tool} to be compiled, which is not there"
    from torch.utils import cpp_extension

    try:
        with _build_folder(capability) as folder:
            cpp_extension.load(
                _name(capability),
                [str(SOURCE)],
                extra_cflags=["-O3", "-fopenmp", "-fno-math-errno", f"-DLIBRARY={_name(capability)}", *flags],
                extra_ldflags=["-fopenmp"],
                build_directory=str(folder),
                is_python_module=False,
            )
    except (RuntimeError, OSError) as error:
        lines = str(error).splitlines()
        return f"can't be compiled: {next((line for line in lines if 'error' in line), lines[0]).strip()[:200]}"
    return None


@contextmanager
def _build_folder(capability: str) -> Iterator[Path]:
    """Lock the folder of the compiled kernel inside the `with` block; each PyTorch has its own.

    PyTorch's own lock is a file, for which it waits without end if a killed process left it there; ours goes with the
    process.
    """
    home = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    folder = Path(home) / f"{_name(capability)}-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "in-use", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield folder


def _name(capability: str) -> str:
    return f"indexcache_{capability.lower()}"
