"""SGLang's `fa3` backend, decoding S layers over selected pages: each layer reads page table and lengths anew.

Read: sglang/srt/layers/attention/flashattention_backend.py of 0.5.23. It needs no plan, so nothing runs outside a CUDA
graph; the selection of a layer lies in tensors that the graph keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels import page_scores, select_pages
from indexcache_kernels.patching import replaced
from sglang_indexcache.families.dense_gqa.decoding import budget_of, note_captured, role_of
from sglang_indexcache.pattern import SHARED
from sglang_indexcache.pattern.selection import Selection


def make_backend_class(stock: Any) -> Any:
    """Make the subclass of `FlashAttentionBackend` that decodes by the `LayerRole` of each layer."""

    class ChoosingFlashAttention(stock):  # type: ignore[misc]
        _indexcache_chosen: Any  # the metadata of S layers
        _indexcache_tables: dict[int, Tensor] | None = None  # by batch size; entries that are not live stay valid

        def forward_decode(
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
            given = (q, k, v, layer, forward_batch, save_kv_cache)
            if found.role == SHARED:
                with replaced((self, "forward_metadata", self._indexcache_chosen)):
                    shared: Tensor = super().forward_decode(*given, **kwargs)
                return shared
            if not found.chooses:
                dense: Tensor = super().forward_decode(*given, **kwargs)
                return dense
            output, lse = super().forward_decode(*given, **{**kwargs, "return_lse": True})
            table, lengths = self._choose(q, lse, layer, found.selection)
            self._indexcache_chosen = replace(
                self.forward_metadata,
                page_table=table,
                cache_seqlens_int32=lengths,
                max_seq_len_k=found.selection.tokens,
                scheduler_metadata=None,  # made for all tokens
            )
            chosen: Tensor = output
            return chosen

        def _choose(self, q: Tensor, lse: Tensor, layer: Any, selection: Selection) -> tuple[Tensor, Tensor]:
            """Return page table `[B, entries]` and lengths `[B]`, int32, for S layers; `lse` is `[B, H]`."""
            metadata, budget = self.forward_metadata, budget_of(selection)
            table, lengths = metadata.page_table, metadata.cache_seqlens_int32
            queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
            keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            scores = page_scores(
                queries, keys, table, lengths, lse=lse, scale=layer.scaling, budget=budget, table_page=self.page_size
            )
            if self._indexcache_tables is None:
                self._indexcache_tables = {}
            if len(table) not in self._indexcache_tables:
                width = selection.tokens // self.page_size
                self._indexcache_tables[len(table)] = torch.zeros(len(table), width, dtype=torch.int32, device=q.device)
            return select_pages(
                scores,
                table,
                lengths,
                budget=budget,
                table_page=self.page_size,
                out_table=self._indexcache_tables[len(table)],
            )

    return ChoosingFlashAttention
