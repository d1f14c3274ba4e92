"""Functions for decoding over selected pages that all attention backends share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from indexcache_dense.family.layer_pages import LayerPages
from indexcache_dense.family.sglang import CAPTURED, LayerRole
from indexcache_dense.kernels import CachedPages
from indexcache_dense.selection import Selection
from indexcache_kernels.backends import Backend
from sglang_indexcache.io.errors import ProofError


def role_of(layer: Any) -> LayerRole:
    """Read the role of a `RadixAttention`.

    Raises:
        ProofError: if none was written.
    """
    found = LayerRole.of(layer)
    if found is None:
        raise ProofError(f"no role was set for layer {layer.layer_id}")
    return found


def note_captured(backend: Any, batch: Any, layer: Any, letter: str) -> None:
    """Record what a layer runs in the CUDA graph that is being captured, if one is."""
    if batch.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        captured: dict[int, dict[int, str]] = backend.__dict__.setdefault(CAPTURED, {})
        captured.setdefault(batch.batch_size, {})[layer.layer_id] = letter


def store_keys(backend: Any, layer: Any, batch: Any, k: Tensor | None, v: Tensor | None, *, save: bool) -> None:
    """Write the keys and values of a decode step into the cache, if SGLang has not done so: selecting reads them."""
    if save and k is not None:
        backend.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)


def keep_read(backend: Any, layer: Any, batch: Any, kernels: Backend = "auto") -> None:
    """Let a selecting layer keep what it needs of the requests that a pass has read a part of."""
    kept: LayerPages | None = backend.indexcache_pages.get(layer.layer_id)
    if kept is None or not kept.keeps or not batch.forward_mode.is_extend():
        return
    lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
    entries = backend.indexcache_requests[batch.req_pool_indices, : int(lengths.max())]
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    kept.read(keys, CachedPages(entries.int(), batch.seq_lens.int()), batch.req_pool_indices, kernels)


def kept_tokens(lengths: Tensor, selection: Selection) -> Tensor:
    """Count the tokens that S layers attend to, from those in the cache; every selection of pages has as many."""
    pages = -(-lengths // selection.page_tokens)
    return pages.clamp_max(selection.pages) * selection.page_tokens - (pages * selection.page_tokens - lengths)
