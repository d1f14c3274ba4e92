"""What decoding over chosen pages has in common, whatever the attention backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from indexcache_kernels import PageBudget
from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.dense_gqa.attention import CAPTURED, Place, place
from sglang_indexcache.selection import Selection


def told_place(layer: Any) -> Place:
    """What a `RadixAttention` was told.

    Raises:
        ProofError: if it was told nothing.
    """
    told = place(layer)
    if told is None:
        raise ProofError(f"layer {layer.layer_id} was told no role")
    return told


def note_captured(backend: Any, batch: Any, layer: Any, letter: str) -> None:
    """Remember what a layer runs in the CUDA graph that is being captured, if one is."""
    if batch.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        captured: dict[int, dict[int, str]] = backend.__dict__.setdefault(CAPTURED, {})
        captured.setdefault(batch.batch_size, {})[layer.layer_id] = letter


def budget_of(selection: Selection) -> PageBudget:
    """What the kernels call a selection."""
    return PageBudget(selection.page_tokens, selection.pages, selection.recent_pages, selection.sink_pages)


def kept_tokens(lengths: Tensor, selection: Selection) -> Tensor:
    """How many tokens S layers attend to, from those in the cache; it does not depend on which pages are chosen."""
    pages = -(-lengths // selection.page_tokens)
    return pages.clamp_max(selection.pages) * selection.page_tokens - (pages * selection.page_tokens - lengths)
