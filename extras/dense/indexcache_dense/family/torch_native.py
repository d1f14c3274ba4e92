"""SGLang's `torch_native` backend, decoding F and S layers over selected pages: eager, the reference for kernels."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from indexcache_dense.family.decoding import keep_read, role_of, store_keys
from indexcache_dense.family.layer_pages import LayerPages
from indexcache_dense.kernels import CachedPages
from indexcache_dense.selection import TOKEN_MAX
from indexcache_kernels.patching import replaced
from sglang_indexcache.pattern import DENSE, FULL

_CHOSEN = "_indexcache_chosen"  # on a forward batch: table and lengths


def make_backend_class(stock: Any) -> Any:
    """Make the subclass of `TorchNativeAttnBackend` that decodes by the `LayerRole` of each layer."""

    class PageSelectingTorchNative(stock):  # type: ignore[misc]
        indexcache_pages: dict[int, LayerPages]  # by layer; written by `DenseGqaSglang.loaded`

        def forward_extend(  # noqa: PLR0917
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Tensor:
            output: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            keep_read(self, layer, forward_batch, "naive")
            return output

        def forward_decode(  # noqa: PLR0917
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Tensor:
            found = role_of(layer)
            if found.role == DENSE:
                output: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            elif found.role == FULL:
                store_keys(self, layer, forward_batch, k, v, save=save_kv_cache)
                save_kv_cache = False
            if found.chooses:
                setattr(forward_batch, _CHOSEN, self._choose(q, layer, forward_batch))
            if found.role == DENSE:
                return output
            table, lengths = getattr(forward_batch, _CHOSEN)
            view = copy.copy(forward_batch)
            view.req_pool_indices = torch.arange(len(table), device=table.device)
            view.seq_lens = lengths.to(forward_batch.seq_lens.dtype)
            with replaced((self, "req_to_token_pool", SimpleNamespace(req_to_token=table))):
                selected: Tensor = super().forward_decode(q, k, v, layer, view, save_kv_cache)
            return selected

        def _choose(self, q: Tensor, layer: Any, batch: Any) -> tuple[Tensor, Tensor]:
            """Return a table `[B, tokens]` of slots and lengths `[B]`, int32, of what the next layers attend to."""
            kept, lengths = self.indexcache_pages[layer.layer_id], batch.seq_lens.int()
            width = max(int(lengths.max()), kept.selection.page_tokens)
            entries = self.req_to_token_pool.req_to_token[batch.req_pool_indices, :width].int().contiguous()
            queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            scale = float(layer.scaling)
            by_attention = kept.selection.score == TOKEN_MAX
            lse = _denominators(queries, keys, entries, lengths, scale) if by_attention else None
            pages = CachedPages(entries, lengths)
            return kept.select(queries, keys, pages, batch.req_pool_indices, lse=lse, scale=scale, backend="naive")

    return PageSelectingTorchNative


def _denominators(q: Tensor, k: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Return the logarithm of the attention's denominator, `[B, H]`, float32; stock attention keeps it to itself."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        keys = k[table[row, :length].long()].float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        rows.append((torch.einsum("hd,lhd->hl", q[row].float(), keys) * scale).logsumexp(-1))
    return torch.stack(rows)
