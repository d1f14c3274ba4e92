"""Functions for decoding over selected pages that all attention backends share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from indexcache_kernels import PageBudget
from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.dense_gqa.sglang import CAPTURED, LayerRole
from sglang_indexcache.pattern.selection import Selection


def role_of(layer: Any) -> LayerRole:
    """Read the role of a `RadixAttention`.

    Raises:
        ProofError: if none was written.
    """
    found = LayerRole.of(layer)
    if found is None:
        raise ProofError(f"layer {layer.layer_id} was told no role")
    return found


def note_captured(backend: Any, batch: Any, layer: Any, letter: str) -> None:
    """Record what a layer runs in the CUDA graph that is being captured, if one is."""
    if batch.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        captured: dict[int, dict[int, str]] = backend.__dict__.setdefault(CAPTURED, {})
        captured.setdefault(batch.batch_size, {})[layer.layer_id] = letter


def budget_of(selection: Selection) -> PageBudget:
    """Return a selection in the form of the kernels."""
    return PageBudget(selection.page_tokens, selection.pages, selection.recent_pages, selection.sink_pages)


def kept_tokens(lengths: Tensor, selection: Selection) -> Tensor:
    """Count the tokens that S layers attend to, from those in the cache; every selection of pages has as many."""
    pages = -(-lengths // selection.page_tokens)
    return pages.clamp_max(selection.pages) * selection.page_tokens - (pages * selection.page_tokens - lengths)
