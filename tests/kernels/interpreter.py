"""Kernels under Triton's interpreter where there is no CUDA device.

The variable is read when kernels are imported, so all are imported here, and taken from here; it is not left to servers
that tests start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
LARGE = (pytest.mark.slow,) if INTERPRETED else ()  # of variants that take the interpreter seconds
_HOMES = {  # the operations of each package
    "indexcache_kernels": ("grouped_attention", "indexer_topk", "prompt_blocks", "sparse_attention"),
    "indexcache_dense.kernels": ("compressed_keys", "page_selection", "rounded_keys"),
    "indexcache_lab.kernels": ("block_attention", "block_scores", "block_swap", "union_attention"),
    "indexcache_train.kernels": ("attention_gradients", "indexer_kl"),
}

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
KERNELS = {name: import_module(f"{home}.{name}.triton") for home, names in _HOMES.items() for name in names}
if INTERPRETED:
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter is on; PyTorch fills new tensors with NaN or the highest integer, so what a kernel leaves
    unwritten is seen."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        for name in ("compressed_keys", "rounded_keys"):  # programs that keep a GPU busy take the interpreter seconds
            monkeypatch.setattr(KERNELS[name], "_PROGRAMS", 40)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
