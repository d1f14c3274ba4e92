"""SGLang's `flashinfer` backend: F and S layers run its decode attention, planned again, over the selected tokens.

A plan needs lengths alone, and the number of selected tokens does not depend on which are selected. So the second plan
is made beside the first, before a forward pass or a replay. The selecting layers write the tokens that it reads.

Read: sglang/srt/layers/attention/flashinfer_backend.py of 0.5.17 and 0.5.23, flashinfer/decode.py of 0.6.15.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from indexcache_dense.family.decoding import keep_read, kept_tokens, note_captured, role_of, store_keys
from indexcache_dense.family.layer_pages import LayerPages
from indexcache_dense.kernels import CachedPages
from indexcache_dense.selection import TOKEN_MAX, Selection
from indexcache_kernels.patching import replaced
from sglang_indexcache.pattern import DENSE, FULL


@dataclass
class _SharedPages:
    """The plan for decoding F and S layers of B requests."""

    wrapper: Any  # flashinfer's, planned for the selected tokens
    sizes: Tensor  # [2 B + 1], int32: `lengths` in the cache, and the `starts` of requests in `tokens`
    tokens: Tensor  # int32, the selected slots of all requests
    kept: Tensor  # [B], int32, number of selected tokens

    @property
    def lengths(self) -> Tensor:
        return self.sizes[: len(self.kept)]

    @property
    def starts(self) -> Tensor:
        return self.sizes[len(self.kept) :]


class _Denominators:
    """A stand-in for a decode wrapper: it runs the wrapper, and keeps the logarithm of the denominator."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper, self.lse = wrapper, torch.empty(0)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor
        output, base_two = self._wrapper.forward_return_lse(*args, **kwargs)
        self.lse = base_two * math.log(2)
        return output


def make_backend_class(stock: Any) -> Any:
    """Make the subclass of `FlashInferAttnBackend` that decodes by the `LayerRole` of each layer."""
    home = sys.modules[stock.__module__]

    class PageSelectingFlashInfer(stock):  # type: ignore[misc]
        indexcache_selection: Selection  # this and the next are written by `DenseGqaSglang.loaded`
        indexcache_pages: dict[int, LayerPages]  # by layer
        _indexcache_plan: _SharedPages  # plan of the pass that runs, or is captured
        _indexcache_plans: dict[int, _SharedPages] | None = None  # plans of CUDA graphs, by batch size
        _indexcache_wrapper: Any = None  # wrapper of passes without a graph

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            if forward_batch.forward_mode.is_decode_or_idle():
                if self._indexcache_wrapper is None:
                    self._indexcache_wrapper = self._new_wrapper()
                plan = self._new_plan(forward_batch.batch_size, self._indexcache_wrapper)
                self._fill(plan, forward_batch, self.decode_split_tile_size, False)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            if not forward_batch.forward_mode.is_decode_or_idle():
                return
            if self._indexcache_plans is None:
                self._indexcache_plans = {}
            batch_size = forward_batch.batch_size
            if in_capture and batch_size not in self._indexcache_plans:
                plan = self._new_plan(batch_size, None)
                plan.wrapper = self._new_wrapper(
                    use_cuda_graph=True,
                    paged_kv_indptr_buffer=plan.starts,
                    paged_kv_indices_buffer=plan.tokens,
                    paged_kv_last_page_len_buffer=self.kv_last_page_len[:batch_size],
                )
                self._indexcache_plans[batch_size] = plan
            plan = self._indexcache_plans[batch_size]
            self._fill(plan, forward_batch, None, self.disable_cuda_graph_kv_split)
            if in_capture:  # SGLang does so with its own: the first plan loads what the fast one uses
                plan.wrapper.begin_forward = partial(home.fast_decode_plan, plan.wrapper)

        def forward_extend(  # noqa: PLR0917
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Tensor:
            output: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            keep_read(self, layer, forward_batch)
            return output

        def forward_decode(  # noqa: PLR0917
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Tensor:
            found = role_of(layer)
            note_captured(self, forward_batch, layer, found.role)
            metadata = self.forward_metadata
            [dense] = metadata.decode_wrappers
            wrapper = dense
            if found.role != DENSE:
                wrapper = self._indexcache_plan.wrapper
            elif found.chooses and found.selection.score == TOKEN_MAX:
                wrapper = _Denominators(dense)
            if found.role == FULL:
                store_keys(self, layer, forward_batch, k, v, save=save_kv_cache)
                save_kv_cache = False
                self._choose(q, None, layer, forward_batch, dense)
            with replaced((self, "forward_metadata", replace(metadata, decode_wrappers=[wrapper]))):
                output: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            if found.chooses and found.role == DENSE:
                self._choose(q, getattr(wrapper, "lse", None), layer, forward_batch, dense)
            return output

        def _choose(self, q: Tensor, lse: Tensor | None, layer: Any, batch: Any, dense: Any) -> None:
            """Write what is attended to next, from the table that SGLang has made for `dense`; `lse` is `[B, H]`."""
            plan, kept = self._indexcache_plan, self.indexcache_pages[layer.layer_id]
            batch_size = len(plan.lengths)
            most = -(-self.max_context_len // kept.selection.page_tokens)
            starts = dense._paged_kv_indptr_buf[:batch_size]
            kept.select(
                q.reshape(batch_size, layer.tp_q_head_num, layer.head_dim),
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                CachedPages(dense._paged_kv_indices_buf, plan.lengths, starts=starts),
                batch.req_pool_indices[:batch_size],
                lse=lse,
                scale=layer.scaling,
                backend="auto",
                scores=torch.empty(batch_size, most, dtype=torch.float32, device=q.device),
                out_table=plan.tokens,
                out_starts=plan.starts[:batch_size],
                out_lengths=plan.kept,
            )

        def _new_wrapper(self, **buffers: Any) -> Any:
            return home.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace_buffer,
                "NHD",
                backend=self.decode_backend,
                use_tensor_cores=self.decode_use_tensor_cores,
                **buffers,
            )

        def _new_plan(self, batch_size: int, wrapper: Any) -> _SharedPages:
            counts = 2 * batch_size + 1, batch_size * self.indexcache_selection.tokens, batch_size
            device = self.kv_indptr[0].device
            return _SharedPages(wrapper, *(torch.zeros(count, dtype=torch.int32, device=device) for count in counts))

        def _fill(self, plan: _SharedPages, batch: Any, fixed_split_size: int | None, disable_split_kv: bool) -> None:
            """Plan for the lengths of a batch, and make this the plan of the pass."""
            size, updater = batch.batch_size, self.indices_updater_decode
            lengths = batch.seq_lens[:size].cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu[:size]
            sizes = torch.zeros(2 * size + 1, dtype=torch.int32, pin_memory=plan.sizes.is_cuda)
            sizes[:size] = lengths
            starts = sizes[size:]
            torch.cumsum(kept_tokens(lengths, self.indexcache_selection), 0, dtype=torch.int32, out=starts[1:])
            plan.sizes.copy_(sizes, non_blocking=True)
            fast = isinstance(plan.wrapper.begin_forward, partial)  # this one takes the lengths that the host knows
            plan.wrapper.begin_forward(
                plan.starts,
                plan.tokens,
                self.kv_last_page_len[:size],
                updater.num_qo_heads,
                updater.num_kv_heads,
                updater.head_dim,
                1,  # slots of a page
                data_type=updater.data_type,
                q_data_type=updater.q_data_type,
                non_blocking=True,
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
                **({"global_override_indptr_cpu": starts} if fast else {}),
            )
            self._indexcache_plan = plan

    return PageSelectingFlashInfer
