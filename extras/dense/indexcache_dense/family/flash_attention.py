"""SGLang's `fa3` backend, decoding F and S layers over selected pages: each layer reads page table and lengths anew.

Read: sglang/srt/layers/attention/flashattention_backend.py of 0.5.23. It needs no plan, so nothing runs outside a CUDA
graph; the selection of a layer lies in tensors that the graph keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from indexcache_dense.family.decoding import keep_read, note_captured, role_of, store_keys
from indexcache_dense.family.layer_pages import LayerPages
from indexcache_dense.kernels import CachedPages
from indexcache_dense.selection import TOKEN_MAX
from indexcache_kernels.patching import replaced
from sglang_indexcache.pattern import DENSE, FULL


def make_backend_class(stock: Any) -> Any:
    """Make the subclass of `FlashAttentionBackend` that decodes by the `LayerRole` of each layer."""

    class PageSelectingFlashAttention(stock):  # type: ignore[misc]
        indexcache_pages: dict[int, LayerPages]  # by layer; written by `DenseGqaSglang.loaded`
        _indexcache_chosen: Any  # the metadata of F and S layers
        _indexcache_tables: dict[int, Tensor] | None = None  # by batch size; entries that are not live stay valid

        def forward_extend(  # noqa: PLR0917
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> Any:
            output = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            keep_read(self, layer, forward_batch)
            return output

        def forward_decode(  # noqa: PLR0917
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> Tensor:
            found = role_of(layer)
            note_captured(self, forward_batch, layer, found.role)
            if found.role == DENSE:
                by_attention = found.chooses and found.selection.score == TOKEN_MAX
                kwargs = {**kwargs, "return_lse": True} if by_attention else kwargs
                output = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
                output, lse = output if by_attention else (output, None)
                if found.chooses:
                    self._choose(q, lse, layer, forward_batch)
                dense: Tensor = output
                return dense
            if found.role == FULL:
                store_keys(self, layer, forward_batch, k, v, save=save_kv_cache)
                save_kv_cache = False
                self._choose(q, None, layer, forward_batch)
            with replaced((self, "forward_metadata", self._indexcache_chosen)):
                selected: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return selected

        def _choose(self, q: Tensor, lse: Tensor | None, layer: Any, batch: Any) -> None:
            """Make the metadata of F and S layers; `lse` is `[B, H]`."""
            metadata, kept = self.forward_metadata, self.indexcache_pages[layer.layer_id]
            entries, lengths = metadata.page_table, metadata.cache_seqlens_int32
            if self._indexcache_tables is None:
                self._indexcache_tables = {}
            if len(entries) not in self._indexcache_tables:
                width = kept.selection.tokens // self.page_size
                made = torch.zeros(len(entries), width, dtype=torch.int32, device=q.device)
                self._indexcache_tables[len(entries)] = made
            table, lengths = kept.select(
                q.reshape(-1, layer.tp_q_head_num, layer.head_dim),
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                CachedPages(entries, lengths, self.page_size),
                batch.req_pool_indices[: len(entries)],
                lse=lse,
                scale=layer.scaling,
                backend="auto",
                out_table=self._indexcache_tables[len(entries)],
            )
            self._indexcache_chosen = replace(
                metadata,
                page_table=table,
                cache_seqlens_int32=lengths,
                max_seq_len_k=kept.selection.tokens,
                scheduler_metadata=None,  # made for all tokens
            )

    return PageSelectingFlashAttention
