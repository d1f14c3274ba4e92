"""SGLang's `torch_native` backend, decoding S layers over chosen pages: eager, what kernels are held against."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels import PageBudget, page_scores, select_pages
from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.dense_gqa.attention import place
from sglang_indexcache.pattern import SHARED
from sglang_indexcache.selection import Selection

_CHOSEN = "_indexcache_chosen"  # on a forward batch: table and lengths


def budget_of(selection: Selection) -> PageBudget:
    """What the kernels call a selection."""
    return PageBudget(selection.page_tokens, selection.pages, selection.recent_pages, selection.sink_pages)


def choosing(stock: Any) -> Any:
    """The subclass of an attention backend that decodes by the `Place` of each layer; itself, where it is one already.

    Raises:
        ProofError: if it is a backend that nobody wrote one for.
    """
    if getattr(stock, "indexcache_stock", None) is not None:
        return stock
    if (stock.__module__, stock.__qualname__) != (
        "sglang.srt.layers.attention.torch_native_backend",
        "TorchNativeAttnBackend",
    ):
        raise ProofError(
            f"the attention backend is {stock.__qualname__}, expected one that can decode over chosen pages:"
            " --attention-backend torch_native"
        )

    class ChoosingBackend(stock):  # type: ignore[misc]
        indexcache_stock = stock
        req_to_token_pool: Any

        def forward_decode(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Tensor:
            told = place(layer)
            if told is None:
                raise ProofError(f"layer {layer.layer_id} was told no role")
            if told.role == SHARED:
                return self._over_chosen(q, k, v, layer, forward_batch, save_kv_cache)
            output: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            if told.chooses:
                setattr(forward_batch, _CHOSEN, self._choose(q, layer, forward_batch, told.selection))
            return output

        def _choose(self, q: Tensor, layer: Any, batch: Any, selection: Selection) -> tuple[Tensor, Tensor]:
            """Table `[B, tokens]` of slots and lengths `[B]`, int32, of what S layers attend to."""
            budget = budget_of(selection)
            lengths = batch.seq_lens.int()
            width = max(int(lengths.max()), selection.page_tokens)
            table = self.req_to_token_pool.req_to_token[batch.req_pool_indices, :width].int().contiguous()
            queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            scale = float(layer.scaling)
            lse = _denominators(queries, keys, table, lengths, scale)
            scores = page_scores(queries, keys, table, lengths, lse, scale, budget=budget, backend="naive")
            return select_pages(scores, table, lengths, budget=budget, backend="naive")

        def _over_chosen(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool) -> Tensor:
            table, lengths = getattr(batch, _CHOSEN)
            view = copy.copy(batch)
            view.req_pool_indices = torch.arange(len(table), device=table.device)
            view.seq_lens = lengths.to(batch.seq_lens.dtype)
            pool = self.req_to_token_pool
            self.req_to_token_pool = SimpleNamespace(req_to_token=table)
            try:
                output: Tensor = super().forward_decode(q, k, v, layer, view, save_kv_cache)
            finally:
                self.req_to_token_pool = pool
            return output

    ChoosingBackend.__name__ = ChoosingBackend.__qualname__ = f"Choosing{stock.__name__}"
    return ChoosingBackend


def _denominators(q: Tensor, k: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """`[B, H]`, float32: logarithm of the attention's denominator, which stock attention keeps to itself."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        keys = k[table[row, :length].long()].float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        rows.append((torch.einsum("hd,lhd->hl", q[row].float(), keys) * scale).logsumexp(-1))
    return torch.stack(rows)
